#!/usr/bin/env bash
# Install a wheel in an empty environment and test it there.
#
#     tools/check_wheel.sh dist/foveate-0.2.0-py3-none-any.whl [pip options, such as -c constraints.txt]
set -euo pipefail
wheel=$(realpath "${1:?usage: tools/check_wheel.sh WHEEL [PIP OPTION]...}")
shift
root=$(realpath "$(dirname "$0")/..")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q "$@" "$wheel" pytest hypothesis

cd "$folder" # so that neither Python nor pytest imports the package of the checkout
unset PYTHONPATH
export PATH=$folder/venv/bin:$PATH FOVEATE_CACHE=$folder/cache
foveate --version
foveate train cnn --source mnist-5k --epochs 1 --samples 200 --out run
foveate evaluate run --scales 1,2 --out evaluated
python - <<'PYTHON'
import foveate
from foveate.data.large_scale import rescale

assert "site-packages" in foveate.__file__, f"{foveate.__file__} is not the installed wheel"
digits = foveate.load_source("mnist-5k").test
net = foveate.create_model("fovmax-mnist-tr2", pretrained=True)
predictions = net(rescale(digits.images[:50], 4.0)).argmax(1)
correct = int((predictions == digits.labels[:50]).sum())
print(f"fovmax-mnist-tr2: {correct} of 50 digits correct at scale 4")
assert correct >= 45
PYTHON
pytest -q -c "$root/pyproject.toml" -p no:cacheprovider "$root/tests/test_shipped.py"
