"""Find photographs that were pasted at random places and sizes, with a run trained on centred ones.

    python examples/photo_scene.py runs/clothes photographs --out scenes.png

`runs/clothes` is a run of `foveate train` on the folder `photographs`, which has a sub-folder per
class. Each scene shows one of its test pictures on grey. `net.search` evaluates the network about a grid
of centres and refines the best. Its window and class are drawn into the scene: green if the centre
is in the photograph and the class is right, red otherwise. A network that was trained on few
pictures is distracted by the edges of the photographs, which training never showed.
"""

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from foveate.data.pictures import list_pictures, read_picture
from foveate.data.recipes import Recipe
from foveate.evaluation.models import load_model
from foveate.execution.plan import search
from foveate.models.channels import ScaleChannels

SIZES = (0.4, 1.0)  # smallest and largest short side of a photograph, in units of the base size
SIDE = 2.5  # of a scene, in the same units


@dataclass(frozen=True)
class Pasted:
    """A photograph in a scene: its box in pixels and its class."""

    top: int
    left: int
    height: int
    width: int
    label: int

    def holds(self, y: float, x: float) -> bool:
        """Whether a point lies within the photograph."""
        inside_y = self.top <= y <= self.top + self.height
        return inside_y and self.left <= x <= self.left + self.width

    def describe(self, classes: tuple[str, ...]) -> str:
        """Its centre, short side and class in words."""
        y, x = self.top + self.height / 2, self.left + self.width / 2
        return f"({y:.0f}, {x:.0f}) {min(self.height, self.width)} {classes[self.label]}"


def compose(path: Path, label: int, recipe: Recipe) -> tuple[Tensor, Pasted]:
    """Paste a photograph at a random place and size on grey: a scene (3, H, W), normalised."""
    side = round(SIDE * recipe.base)
    low, high = map(math.log, SIZES)
    short = max(1, round(recipe.base * math.exp(low + (high - low) * float(torch.rand(())))))
    picture = torch.from_numpy(read_picture(path).transpose(2, 0, 1).copy())
    photo = replace(recipe, base=short).transform()(picture)[:, :side, :side]
    height, width = photo.shape[1:]
    top, left = (int(torch.randint(side - n + 1, ())) for n in (height, width))
    scene = torch.zeros(3, side, side)  # the mean colour that the recipe subtracts
    scene[:, top : top + height, left : left + width] = photo
    return scene, Pasted(top, left, height, width, label)


def draw(
    scene: Tensor, recipe: Recipe, box: tuple[float, ...], text: str, right: bool
) -> Image.Image:
    """Draw a found window and its class into a scene."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (recipe.mean, recipe.std))
    pixels = (255 * (scene * std + mean)).clamp(0, 255).byte()
    image, colour = (
        Image.fromarray(pixels.permute(1, 2, 0).numpy()),
        "#16a34a" if right else "#dc2626",
    )
    pen = ImageDraw.Draw(image)
    pen.rectangle(box, outline=colour, width=max(1, image.width // 150))
    pen.text((max(2, box[0] + 4), max(2, box[1] + 4)), text, fill=colour)
    return image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run", help="folder of a run on photographs")
    parser.add_argument("folder", type=Path, help="photographs, with a sub-folder per class")
    parser.add_argument("--scenes", type=int, default=6)
    parser.add_argument("--step", type=float, help="pixels between centres; a quarter of the base")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("scenes.png"))
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = load_model(options.run)
    net, recipe = model.net, model.recipe
    if recipe is None or not isinstance(net, ScaleChannels):
        parser.error(f"{options.run} was not trained on photographs")
    items, classes = list_pictures(options.folder, "test")
    images, inside, right = [], 0, 0
    print("photograph: centre (y, x), short side, class    found: centre, window, class")
    for index in torch.randperm(len(items))[: options.scenes].tolist():
        scene, pasted = compose(*items[index], recipe)
        found = search(net, scene[None], options.step or recipe.base / 4)
        (y, x), side = found.centres[0].tolist(), float(found.windows[0])
        name = classes[int(found.classes[0])]
        hits = pasted.holds(y, x), name == classes[pasted.label]
        inside, right = inside + hits[0], right + hits[1]
        print(f"{pasted.describe(classes)}    ({y:.0f}, {x:.0f}) {side:.0f} {name}")
        box = (x - side / 2, y - side / 2, x + side / 2, y + side / 2)
        text = f"{name} {100 * float(found.confidence[0]):.0f} %"
        images.append(draw(scene, recipe, box, text, all(hits)))
    print(f"Of {len(images)} searches {inside} end in the photograph; {right} classes are right.")
    columns, side = min(3, len(images)), images[0].width
    sheet = Image.new("RGB", (columns * side, math.ceil(len(images) / columns) * side), "white")
    for place, image in enumerate(images):
        sheet.paste(image, (place % columns * side, place // columns * side))
    sheet.save(options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
