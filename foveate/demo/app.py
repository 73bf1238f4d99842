"""The layout of the page: one digit on the first tab, scenes on the second."""

from pathlib import Path
from string import Template
from typing import Any

import gradio as gr

from foveate.demo.handlers import START, Handlers
from foveate.demo.maps import scene_panels
from foveate.demo.scenes import FEWEST, MOST, compose, explore, suitable
from foveate.demo.uploads import BYTES

HERE = Path(__file__).parent
TITLE = "foveate: one digit, any size"
GREETING = """<div class="fov"><h1>One digit, any size</h1>
<p class="lead">Networks that learned digits of one size. Change the size, and see which of them
still know what they see.</p></div>"""
FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif")
PREPARED = (
    "What is drawn or uploaded is first brought to the form of MNIST's digits: light on dark, 20 "
    "of 28 pixels high, centred. The zoom then makes it as the data set does."
)
UNSEEN = (
    "The digits to pick, also those of the scenes, are test digits that these networks never saw."
)
MAYBE_SEEN = (
    "The digits to pick, also those of the scenes, are of MNIST's training set, from which these "
    "networks learned: the page shows how they work, not how good they are."
)


def theme() -> gr.themes.Base:
    """Calm colours, and the fonts that the reader's system has."""
    return gr.themes.Default(
        primary_hue="blue", neutral_hue="slate", font=FONTS, font_mono=("ui-monospace", "monospace")
    )


def head() -> str:
    """The style of the page; as css= it would reach what is inside gradio's container only."""
    return f"<style>{(HERE / 'page.css').read_text(encoding='utf-8')}</style>"


def build(handlers: Handlers) -> gr.Blocks:
    """Lay out the page."""
    page: gr.Blocks
    with gr.Blocks(title=TITLE, analytics_enabled=False) as page:
        gr.HTML(GREETING)
        with gr.Tabs():
            with gr.Tab("One digit"):
                _one_digit(handlers)
            with gr.Tab("A scene") as scene:
                _scene(handlers, scene)
        gr.HTML(_notes(handlers))
    return page


def _notes(handlers: Handlers) -> str:
    own = all(contender.network.source == "mnist-5k" for contender in handlers.contenders)
    lines = (PREPARED, UNSEEN if own else MAYBE_SEEN)
    return f"""<div class="fov">{"".join(f'<p class="quiet">{line}</p>' for line in lines)}</div>"""


def _one_digit(handlers: Handlers) -> None:
    # The page calls these by their names, each with one list.
    def look(question: list[Any]) -> dict[str, Any]:
        return handlers.look(*question)

    def take(question: list[Any]) -> dict[str, Any]:
        return handlers.take(*question)

    def offer(turn: int) -> dict[str, Any]:
        return {"html": handlers.offer(turn)}

    gr.HTML(
        html_template=_opening(handlers),
        js_on_load=(HERE / "explore.js").read_text(encoding="utf-8"),
        server_functions=[look, take, offer],
        apply_default_css=False,
    )


def _opening(handlers: Handlers) -> str:
    """The first tab as it is when the page opens."""
    form = Template((HERE / "explore.html").read_text(encoding="utf-8"))
    zoom = START[1]
    return form.substitute(
        handlers.start(), offer=handlers.offer(0), zoom=f"× {zoom:.2f}", octave=1, bytes=BYTES
    )


def _scene(handlers: Handlers, tab: gr.Tab) -> None:
    networks = {contender.title: contender for contender in suitable(handlers.contenders)}
    if not networks:
        gr.HTML('<div class="fov"><p>None of these networks has scale channels.</p></div>')
        return
    with gr.Row():
        count = gr.Slider(FEWEST, MOST, value=6, step=1, label="Digits")
        chosen = gr.Radio(list(networks), value=next(iter(networks)), label="Network")
        seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**31 - 1)
        another = gr.Button(
            "Another scene", size="md", min_width=150, scale=0, elem_classes="fov-again"
        )
    shown = gr.HTML(apply_default_css=False)

    def draw(count: float, title: str, seed: float | None) -> str:
        def work() -> dict[str, Any]:
            scene, placed = compose(handlers.digits, int(count), int(seed or 0))
            contender = networks[title]
            return {"html": scene_panels(contender, scene, placed, explore(contender, scene))}

        reply = handlers.in_turn(work)
        inside = reply.get("html") or f'<p class="notice" role="alert">{reply["error"]}</p>'
        return f'<div class="fov">{inside}</div>'

    inputs = [count, chosen, seed]
    another.click(lambda seed: int(seed or 0) + 1, seed, seed, queue=False)
    gr.on([tab.select, count.release, chosen.change, seed.change], draw, inputs, shown)
