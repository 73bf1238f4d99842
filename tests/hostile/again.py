"""Run one hostile case again and show all of it: python tests/hostile/again.py GROUP NUMBER."""

import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main(group, number):
    """Run the case, and leave the folder it ran in."""
    from hostile.sandbox import Sandbox, case_of, judge

    case = case_of(group, int(number))
    sandbox = Sandbox(Path(tempfile.mkdtemp(prefix="hostile-")))
    result = sandbox.run(case)
    print(f"{case}\nin {sandbox.place}: foveate {shlex.join(case.argv)}")
    print(f"{result.out}{result.err}\nexit code {result.code} after {result.seconds:.2f} s")
    print("problem:", "no end" if result.code is None else judge(case, result))


if __name__ == "__main__":
    main(*sys.argv[1:])
