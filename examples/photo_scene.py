"""Locate off-centre photographs of random size with a network trained on centred photographs.

    python examples/photo_scene.py runs/clothes photographs --out scenes.png

``runs/clothes`` is a run of ``foveate train`` on the folder ``photographs``, which has a subfolder
per class. The program pastes test photographs at random positions and sizes onto grey scenes.
``net.search`` evaluates the network at a grid of centres and refines the best ones. The program
draws the window and the class that it finds into the scene: green if the centre lies in the
photograph and the class is correct, red otherwise. A network trained on few photographs is often
distracted by the edges of the pasted photographs, because training images contain no such edges.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from foveate.data.pictures import Item, list_pictures, read_picture
from foveate.data.recipes import Recipe
from foveate.evaluation.models import load_model
from foveate.execution.plan import search
from foveate.models.channels import ScaleChannels

SIZES = (0.4, 1.0)  # smallest and largest short side of a photograph, in units of the base size
SIDE = 2.5  # side of a scene, in the same units
Classes = tuple[str, ...]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Pasted:
    """Bounding box, in pixels, and class index of a photograph in a scene."""

    top: int
    left: int
    height: int
    width: int
    label: int

    def holds(self, y: float, x: float) -> bool:
        """Return whether a point lies in the photograph."""
        inside_y = self.top <= y <= self.top + self.height
        return inside_y and self.left <= x <= self.left + self.width

    def describe(self, classes: Classes) -> str:
        """Format the centre, the short side and the class name."""
        y, x = self.top + self.height / 2, self.left + self.width / 2
        return f"({y:.0f}, {x:.0f}) {min(self.height, self.width)} {classes[self.label]}"


def compose(item: Item, recipe: Recipe) -> tuple[Tensor, Pasted]:
    """Paste a photograph at a random position and size onto a normalised grey scene (3, H, W)."""
    (path, label), side = item, round(SIDE * recipe.base)
    low, high = map(math.log, SIZES)
    short = max(1, round(recipe.base * math.exp(low + (high - low) * float(torch.rand(())))))
    picture = torch.from_numpy(read_picture(path).transpose(2, 0, 1).copy())
    photo = replace(recipe, base=short).transform()(picture)[:, :side, :side]
    height, width = photo.shape[1:]
    top, left = (int(torch.randint(side - n + 1, ())) for n in (height, width))
    scene = torch.zeros(3, side, side)  # 0 is the mean colour of the recipe
    scene[:, top : top + height, left : left + width] = photo
    return scene, Pasted(top, left, height, width, label)


def find(
    net: ScaleChannels, recipe: Recipe, classes: Classes, scene: Tensor, pasted: Pasted, step: float
) -> tuple[Image.Image, bool, bool]:
    """Search a scene; return its drawing, and whether the centre and the class are correct."""
    found = search(net, scene[None], step)
    (y, x), side = found.centres[0].tolist(), float(found.windows[0])
    label = int(found.classes[0])
    print(f"{pasted.describe(classes)}    ({y:.0f}, {x:.0f}) {side:.0f} {classes[label]}")
    hits = pasted.holds(y, x), label == pasted.label
    box = (x - side / 2, y - side / 2, x + side / 2, y + side / 2)
    text = f"{classes[label]} {100 * float(found.confidence[0]):.0f} %"
    return draw(scene, recipe, box, text, "#16a34a" if all(hits) else "#dc2626"), *hits


def draw(scene: Tensor, recipe: Recipe, box: Box, text: str, colour: str) -> Image.Image:
    """Draw a window and the name of its class into a scene."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (recipe.mean, recipe.std))
    pixels = (255 * (scene * std + mean)).clamp(0, 255).byte()
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    pen, size = ImageDraw.Draw(image), max(9, image.width // 25)
    pen.rectangle(box, outline=colour, width=max(1, image.width // 150))
    x, y = (min(max(2.0, at + 4), image.width - 5.0 * size) for at in box[:2])
    pen.text((x, y), text, fill="white", font=ImageFont.load_default(size), stroke_width=1,
             stroke_fill=colour)  # fmt: skip
    return image


def tile(images: Sequence[Image.Image], columns: int = 3, gap: int = 4) -> Image.Image:
    """Arrange the scenes in a grid."""
    side, columns = images[0].width + gap, min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * side - gap, rows * side - gap), "white")
    for place, image in enumerate(images):
        sheet.paste(image, (place % columns * side, place // columns * side))
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run", help="folder of a run trained on photographs")
    parser.add_argument("folder", type=Path, help="photographs, with one subfolder per class")
    parser.add_argument("--scenes", type=int, default=6, help="number of scenes (default: 6)")
    parser.add_argument("--step", type=float, help="pixels between centres (default: base / 4)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--out", type=Path, default=Path("scenes.png"), help="image file (default: scenes.png)"
    )
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = load_model(options.run)
    net, recipe = model.net, model.recipe
    if recipe is None or not isinstance(net, ScaleChannels):
        parser.error(f"{options.run} was not trained on photographs: pass a run of finetune")
    items, classes = list_pictures(options.folder, "test")
    step = options.step or recipe.base / 4
    print("photograph: centre (y, x), short side, class    found: centre (y, x), window, class")
    results = [
        find(net, recipe, classes, *compose(items[index], recipe), step)
        for index in torch.randperm(len(items))[: options.scenes].tolist()
    ]
    images, inside, right = zip(*results, strict=True)
    print(f"{sum(inside)} of {len(images)} searches found the photograph; ", end="")
    print(f"{sum(right)} classes are correct.")
    tile(images).save(options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
