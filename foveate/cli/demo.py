"""The command that serves the demo page: demo."""

from typing import Annotated

from foveate.cli import options
from foveate.cli.console import OUTPUT, status


def demo(
    model: Annotated[list[str] | None, options.MODEL_REF("trained digit networks")] = None,
    host: Annotated[str, options.HOST()] = "127.0.0.1",
    port: Annotated[int, options.PORT(min=0, max=65535)] = 7860,
    pretrained: options.PretrainedOption = False,
    weights: options.WeightsOption = None,
    trust: options.TrustOption = False,
) -> None:
    """Open a web page that compares networks while you change the size of an object.

    ```
    foveate demo
    foveate demo --model quickstart/cnn --model quickstart/fovmax
    foveate demo --model timm:resnet18 --pretrained
    ```

    Repeat --model to compare up to four networks. For digit networks, draw, upload or choose a
    digit, and drag the zoom from 1/2 to 8; a second tab shows scenes with several digits. For runs
    on photographs and timm models, upload or choose a photograph, and change its size and position;
    a single network is compared with its backbone on the whole frame. By default, only this machine
    can open the page. The page works offline. Requires foveate[demo].
    """
    from foveate.demo.pages import open_page
    from foveate.demo.server import serve

    with status("loading ..."):
        page = open_page(model or (), trust=trust, pretrained=pretrained, weights=weights)
    serve(page, host, port, lambda address: OUTPUT.print(f"{address} (press Ctrl-C to stop)"))
