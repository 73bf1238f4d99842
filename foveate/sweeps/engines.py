"""The door to the engines: something that performs jobs, by name."""

from foveate.data.sources import load_source
from foveate.errors import ConfigError
from foveate.sweeps.runner import SIDE_BY_SIDE, Engine, LocalEngine
from foveate.training.data import Load
from foveate.training.session import Watch


def make_engine(
    name: str,
    *,
    device: str = "cpu",
    together: int = 0,
    address: str | None = None,
    cpus: int = 0,
    gpus: float = 0.0,
    watch: Watch = lambda config, progress, steps: None,
    load: Load = load_source,
) -> Engine:
    """Make the engine `local`, this process, or `ray`, the cluster at `address`.

    `cpus` are the threads of a run, 0 for as many as torch takes here. `gpus` is the part of a GPU
    that a run gets; 0 leaves it to `together`, the number of runs side by side on one. `watch` and
    `load` are the local engine's.
    """
    on_gpu = device.startswith("cuda")
    together = round(1 / gpus) if gpus and on_gpu else together
    if name == "local":
        if address is not None:
            raise ConfigError("--address is of a Ray cluster; add --engine ray")
        return LocalEngine(device=device, together=together, cpus=cpus, watch=watch, load=load)
    if name == "ray":
        from foveate.sweeps.ray_engine import RayEngine

        part = gpus or 1 / (together or SIDE_BY_SIDE)
        return RayEngine(device=device, address=address, cpus=cpus, gpus=part if on_gpu else 0.0)
    raise ConfigError(f"engine must be local or ray, got {name!r}")
