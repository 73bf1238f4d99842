"""The command that opens the web page: demo."""

from typing import Annotated

import typer

from foveate.cli.console import ERRORS, OUTPUT, TrustOption


def demo(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Trained network, run folder, file of weights or timm:NAME; up to four times."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = ("127.0.0.1"),
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")
    ] = 7860,
    pretrained: Annotated[
        bool, typer.Option(help="Download the weights of timm:NAME, unless they are cached.")
    ] = False,
    trust: TrustOption = False,
) -> None:
    """Open a web page that compares networks side by side while you change the size of an object.

    Example: foveate demo --model quickstart/cnn --model quickstart/fovmax

    Networks of digits: draw a digit, upload or pick one, and drag the zoom from 1/2 to 8. A second
    tab has scenes with several digits. Runs on photographs, and models of timm: upload or pick a
    photograph, and drag its size and place; a single network is compared with its backbone on the
    whole frame. Only this machine can open the page unless --host says otherwise. Serving needs no
    network connection. Needs foveate[demo].
    """
    from foveate.demo.pages import open_page
    from foveate.demo.server import serve

    with ERRORS.status("loading ..."):
        page = open_page(model or (), trust=trust, pretrained=pretrained)
    serve(
        page,
        host,
        port,
        lambda address: OUTPUT.print(f"{address} (Ctrl-C ends it)", markup=False),
    )
