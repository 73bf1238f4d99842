"""The command that serves the demo page: demo."""

from typing import Annotated

import typer

from foveate.cli.console import OUTPUT, status
from foveate.cli.options import MODEL_REF, PretrainedOption, TrustOption


def demo(
    model: Annotated[list[str] | None, MODEL_REF("trained digit networks")] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="HOST",
            help="Address to listen on; 0.0.0.0 admits other machines.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="PORT",
            min=0,
            max=65535,
            help="Port to listen on; 0 for any free port.",
        ),
    ] = 7860,
    pretrained: PretrainedOption = False,
    trust: TrustOption = False,
) -> None:
    """Open a web page that compares networks while you change the size of an object.

    ```
    foveate demo
    foveate demo --model quickstart/cnn --model quickstart/fovmax
    foveate demo --model timm:resnet18 --pretrained
    ```

    Repeat --model to compare up to four networks. Digit networks: draw, upload or choose a digit,
    and drag the zoom from 1/2 to 8; a second tab shows scenes with several digits. Runs on
    photographs and timm models: upload or choose a photograph, and drag its size and position; a
    single network is compared with its backbone on the whole frame. By default only this machine
    can open the page. The page works offline. Requires foveate[demo].
    """
    from foveate.demo.pages import open_page
    from foveate.demo.server import serve

    with status("loading ..."):
        page = open_page(model or (), trust=trust, pretrained=pretrained)
    serve(page, host, port, lambda address: OUTPUT.print(f"{address} (press Ctrl-C to stop)"))
