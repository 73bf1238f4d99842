"""A file that must not be read, under the names by which a request could try to."""

import os
import secrets
import socket

import pytest
from demo_nets import saved, seven


class Bait:
    """A picture that an attacker wants, under several names; it notices being read or fetched."""

    def __init__(self, folder):
        self.token = secrets.token_hex(16).encode()
        self.file = folder / "secret.png"
        self.file.write_bytes(saved(seven()) + self.token)
        self.link, self.pipe = folder / "link.png", folder / "pipe.png"
        self.link.symlink_to(self.file)
        os.mkfifo(self.pipe)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        os.utime(self.file, (1, 2))  # read before it was written: the next reading is recorded
        url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/secret.png"
        paths = [str(self.file), str(self.link), str(self.pipe)]
        up = "../" * 40 + str(self.file).lstrip("/")
        self.names = [*paths, up, "file://" + paths[0], url]
        files = [{"path": name, "meta": {"_type": "gradio.FileData"}} for name in self.names]
        self.values = [*self.names, *files, *({"url": name} for name in self.names), [up]]

    def untouched(self):
        assert self.file.stat().st_atime == 1
        with pytest.raises(OSError):  # nobody has it open for reading
            os.close(os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK))
        with pytest.raises(BlockingIOError):  # nobody has connected
            self.listener.accept()[0].close()
