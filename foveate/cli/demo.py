"""The command that opens the web page: demo."""

from typing import Annotated

import typer

from foveate.cli.console import ERRORS, OUTPUT, TrustOption


def demo(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Trained network, run folder or file of weights; may be given four times."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = ("127.0.0.1"),
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")
    ] = 7860,
    trust: TrustOption = False,
) -> None:
    """Open a web page that compares networks side by side while you change the size of a digit.

    Example: foveate demo --model quickstart/cnn --model quickstart/fovmax

    Draw a digit, upload or pick one, and drag the zoom from 1/2 to 8. A second tab has scenes with
    several digits. Only this machine can open the page unless --host says otherwise. It needs no
    network connection. Needs foveate[demo].
    """
    from foveate.data.sources import load_source
    from foveate.demo.digit_page import DigitPage
    from foveate.demo.networks import load_networks
    from foveate.demo.server import serve

    with ERRORS.status("loading ..."):
        page = DigitPage(load_networks(model or (), trust), load_source("mnist-5k").test)
    serve(
        page,
        host,
        port,
        lambda address: OUTPUT.print(f"{address} (Ctrl-C ends it)", markup=False),
    )
