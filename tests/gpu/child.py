"""What the checks have done in processes of their own.

python -m tests.gpu.child pack DEVICE true|false FILE              trains one pack, and leaves all that it left
python -m tests.gpu.child peer DEVICE true|false FILE WIDTH KIND   a peer of check 10: for each number of seconds that
                                                                   it reads, seconds of a step from as many as take so
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from harness.model.determinism import make_deterministic
from tests.gpu.bench import Bench

ROOT = Path(__file__).resolve().parents[2]


def command(bench: Bench, task: str, file: Path, *others: str) -> list[str]:
    given = [str(bench.device), json.dumps(bench.is_dry), str(file), *others]
    return [sys.executable, "-m", "tests.gpu.child", task, *given]


def environment() -> dict[str, str]:
    """For an interpreter that loads from where this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


class OtherPeer:
    """A peer in a process of its own: what it does to its CUDA context, or breaks there, is not ours."""

    def __init__(self, bench: Bench, width: int, kind: str):
        self.kind, self._log = kind, bench.place.with_suffix(f".{kind}.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command(bench, "peer", bench.place.with_suffix(f".{kind}.json"), str(width), kind),
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def step_seconds(self, seconds: float) -> float:
        """Of one step. Raises RuntimeError with its last words where the process has ended."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            print(seconds, file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            words = self._log.read_text().strip().splitlines() or ["nothing"]
            raise RuntimeError(f"the {self.kind} peer ended with {self._process.wait()}: {words[-1]}")
        return float(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def peers(bench: Bench, width: int, *kinds: str) -> Iterator[dict[str, OtherPeer]]:
    """These, each of which has compiled what it compiles."""
    with contextlib.ExitStack() as stack:
        started = {kind: OtherPeer(bench, width, kind) for kind in kinds}
        for peer in started.values():
            stack.callback(peer.close)
        for peer in started.values():
            peer.step_seconds(0.0)
        yield started


def serve(bench: Bench, width: int, kind: str) -> None:
    from tests.gpu.peer import Peer
    from tests.gpu.speed import trials_of

    peer = Peer(bench, trials_of(bench, width, 1, 10)[0], kind)
    for line in sys.stdin:
        print(peer.step_seconds(float(line)), flush=True)


def main(task: str, device: str, is_dry: str, file: str, *others: str) -> None:
    bench = Bench(torch.device(device), json.loads(is_dry), Path(file).with_suffix(".json"))
    if bench.is_dry:
        torch.set_num_threads(1)
    make_deterministic(bench.device)
    if task == "peer":
        width, kind = others
        serve(bench, int(width), kind)
    elif task == "pack":
        from tests.gpu.bits import left_by_all

        torch.save(left_by_all(bench), file)
    else:
        raise SystemExit(f"error: {task}: no such task")


if __name__ == "__main__":
    main(*sys.argv[1:])
