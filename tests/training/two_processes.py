"""Training by two processes on the CPU, joined by gloo: python two_processes.py FOLDER runs every case below.

Each case trains, resumes or evaluates in FOLDER/NAME, and the tests compare what lies there with one process. All run
in one pair of processes, forked from this one, so PyTorch is imported once.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from training_small import small_config, small_model, small_set  # noqa: E402

from swin_lessons.models import create_model  # noqa: E402
from swin_lessons.training import evaluate, loop, train  # noqa: E402
from swin_lessons.training.parallel import shard  # noqa: E402
from swin_lessons.training.processes import Processes  # noqa: E402

STOP = 5


def config(**changes):
    """Everything on: mixing, erasing, drop path (in the model), averaging; eight images a step, so four a process."""
    return small_config(
        **{"batch_size": 8, "micro_batch": None, "steps": 8, "save_every": 4, "lr": 1e-3} | changes
    )


def swin(name="swin_micro_fmnist", drop_path=0.3, **more):
    torch.manual_seed(0)
    model = create_model(name, num_classes=4, img_size=16, drop_path_rate=drop_path, **more)
    with torch.no_grad():
        for parameter in model.parameters():  # V2 starts as the identity, which would prove nothing
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def sets():
    return small_set(40, img_size=16), small_set(23, seed=1, img_size=16)


class Stopped(Exception):
    pass


def run(folder, model, changes=None, stop=None, **options):
    """Train; where `stop` is given, until the step of that number."""
    original = loop.Run._after_step

    def stopping(self, epoch, bar):
        original(self, epoch, bar)
        if self.state.step == stop:
            raise Stopped

    loop.Run._after_step = stopping
    try:
        return train(model, *sets(), config(**(changes or {})), folder, **options)
    except Stopped:
        return None
    finally:
        loop.Run._after_step = original


class Overflowing(type(small_model())):
    """Its logits give gradients beyond fp16's range on one process, in the second step."""

    calls = 0

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            self.calls += 1
            if self.calls == 2 and (not dist.is_initialized() or dist.get_rank() == 1):
                y.register_hook(lambda grad: grad * float("inf"))
        return y


def overflowing():
    torch.manual_seed(0)
    return Overflowing(drop_path=0)


PLAIN = {"augment": "none"}
FP16 = {"precision": "fp16", "steps": 6, "save_every": 6}
CASES = {
    "ddp": lambda folder: run(folder, swin()),
    "fsdp": lambda folder: run(folder, swin(), parallel="fsdp"),
    "fsdp-v2": lambda folder: run(folder, swin("swinv2_micro_fmnist"), parallel="fsdp"),
    "deit": lambda folder: run(folder, swin("deit_micro_fmnist"), parallel="fsdp"),
    "ddp-passes": lambda folder: run(folder, swin(), {"micro_batch": 3}),
    "fsdp-passes": lambda folder: run(folder, swin(), {"micro_batch": 3}, parallel="fsdp"),
    "ddp-recomputed": lambda folder: run(folder, swin(checkpointing=True)),
    "fsdp-recomputed": lambda folder: run(folder, swin(checkpointing=True), parallel="fsdp"),
    "ddp-fp16": lambda folder: train(overflowing(), *sets8(), config(**FP16), folder),
    "fsdp-fp16": lambda folder: train(overflowing(), *sets8(), config(**FP16), folder, parallel="fsdp"),
    # stopped here, resumed by one process in the test
    "ddp-then-one": lambda folder: run(folder, swin(), stop=STOP),
    "fsdp-then-one": lambda folder: run(folder, swin(), stop=STOP, parallel="fsdp"),
    # stopped by one process in the test, resumed here
    "one-then-ddp": lambda folder: run(folder, swin(), resume=True),
    "one-then-fsdp": lambda folder: run(folder, swin(), resume=True, parallel="fsdp"),
    "fsdp-then-ddp": lambda folder: (
        run(folder, swin(), stop=STOP, parallel="fsdp"),
        run(folder, swin(), resume=True),
    ),
    "evaluation": lambda folder: evaluations(folder),
    "damaged": lambda folder: damaged(folder),
}


def sets8():
    return small_set(40), small_set(23, seed=1)


def evaluations(folder):
    """Of 23, 3 and 1 images by a whole and by a sharded model, in batches of 5 a process; from each process."""
    whole, sharded = swin(), swin()
    shard(sharded, Processes.current())
    for name, model in {"whole": whole, "sharded": sharded}.items():
        for count in (23, 3, 1):
            result = evaluate(
                model, small_set(count, seed=2, img_size=16), batch_size=5, processes=Processes.current()
            )
            values = [result.loss, result.top1, result.top5, result.confusion.tolist()]
            path = folder / f"{name}-{count}-{dist.get_rank()}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(values))


def damaged(folder):
    """A flipped bit in a sharded checkpoint; the message goes to a file."""
    run(folder, swin(), stop=STOP, parallel="fsdp")
    if dist.get_rank() == 0:
        path = max((folder / "checkpoints").iterdir()) / "shard-00001-model-00001-of-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 4
        path.write_bytes(data)
    dist.barrier()
    try:
        run(folder, swin(), resume=True, parallel="fsdp")
    except Exception as error:
        (folder / f"error-{dist.get_rank()}").write_text(f"{type(error).__name__}: {error}")


def child(rank, folder, names):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for name in names:
        CASES[name](folder / name)
        dist.barrier()
    dist.destroy_process_group()


def main(folder, names):
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                child(rank, folder, names)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    sys.exit(max(main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))))
