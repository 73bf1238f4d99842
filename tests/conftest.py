"""Settings for all tests, and a server of the page that several files of tests attack."""

import signal

import pytest
from browsed_page import launched, visiting
from hypothesis import settings
from torchvision_ops import declare_missing

settings.register_profile("steady", deadline=None)  # timings here are noisy
settings.load_profile("steady")
declare_missing()
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell script
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def two_threads():
    """Two threads for torch, as on a machine with two cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tiny run that nothing disturbed."""
    from tiny_runs import tiny

    from foveate.training.loop import train

    return train(tiny(), tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def digits():
    """The test images of the embedded digits."""
    from foveate.data.sources import load_source

    return load_source("mnist-5k").test


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    """The folders of runs of the networks that the demo compares."""
    from demo_nets import made_runs

    return made_runs(tmp_path_factory.mktemp("nets"))


@pytest.fixture(scope="module")
def fovmax_run(tmp_path_factory):
    """The folder of a run of fovmax, trained for seconds."""
    from demo_nets import made_runs

    return made_runs(tmp_path_factory.mktemp("nets"), ["fovmax"])[0]


@pytest.fixture(scope="module")
def server_folder(tmp_path_factory):
    """Home, temporary folder, cache and log of `server`."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(server_folder, fovmax_run):
    """Host and port of a page served by the real command; its log may hold one line."""
    from served_page import serving

    with serving(server_folder, [fovmax_run]) as address:
        yield address.removeprefix("http://")


@pytest.fixture(scope="module")
def browser():
    """Chromium, for the pages of the demo; a module gives their `address`."""
    with launched() as opened:
        yield opened


@pytest.fixture
def open_page(browser, address):
    with visiting(browser, address) as visit:
        yield visit


@pytest.fixture
def page(open_page):
    return open_page()
