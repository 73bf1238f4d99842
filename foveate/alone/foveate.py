"""Load the package from a `sys.path` folder that makes nothing else importable."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

spec = spec_from_file_location("foveate", Path(__file__).parents[1] / "__init__.py")
assert spec and spec.loader
sys.modules["foveate"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["foveate"])
