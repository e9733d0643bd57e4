"""CPU time of prompts and decoding steps, compared with llama.cpp and transformers.

    launch bench make-model 0.6B work/0.6B
    python -m tests.tools.cpu_speed gguf work/0.6B work/q8.gguf Q8_0   # for llama.cpp (xllamacpp)
    python -m tests.tools.cpu_speed run work/0.6B work/0.6B:int8 llama:work/q8.gguf hf:work/0.6B

Each argument of `run` is a process: a checkpoint for a worker, or one of the others' by a prefix. A
checkpoint that ends in `:int8`, `:int4` or `:none` has a quantized head, too. `copy:FOLDER` copies
as many bytes as the checkpoint has, and `avx2:FOLDER` is a worker without AVX-512. The processes
take turns, so that all of them meet the same machine. A turn is `--batch` prompts, then
`--steps` steps. Printed: median and best of the CPU time, or of `--wall` time, in ms.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Turn = Callable[[], tuple[float, float]]
"""returns seconds: of the prompts, and of one step"""
CLOCK, THREADS = "CPU_SPEED_CLOCK", "CPU_SPEED_THREADS"
clock = time.perf_counter if os.environ.get(CLOCK) == "wall" else time.process_time
num_threads = int(os.environ.get(THREADS, "1"))


def prompt(slot: int, length: int) -> list[int]:
    """Return token ids, other ones for each slot, that every vocabulary has."""
    return [(slot + place) % 256 for place in range(length)]


def worker_turn(name: str, batch: int, length: int, steps: int) -> Turn:
    """Return the turn of a worker's runner."""
    from penstock.protocol.config import Config
    from penstock.protocol.messages.packed import pack
    from penstock.protocol.messages.plan import BatchPlan, RowAdded
    from penstock.protocol.messages.worker import WorkerAssignment
    from penstock.services.worker.loading import load

    folder, _, quantization = name.partition(":")
    blocks = -(-(length + steps) // 16)
    config = Config(
        model=folder,
        device="cpu",
        num_threads=num_threads,
        quantization=quantization or "none",  # type: ignore[arg-type]
        quantize_lm_head=":" in name,
        num_blocks=blocks * batch,
        max_num_seqs=batch,
        max_num_batched_tokens=max(batch * length, batch + 64),
        max_model_len=length + steps + 16,
    )
    runner = load(config, WorkerAssignment(1, "g", 0, 1, ""), lambda: None)

    def states(step: int) -> bytes:
        """Return the state blocks of the first two steps, which alternate later."""
        if not runner.num_state_blocks or step > 1:
            return b""
        blocks = ((slot, 2 * slot if step else -1, 2 * slot + step) for slot in range(batch))
        return pack(number for row in blocks for number in row)

    def turn() -> tuple[float, float]:
        runner.clear()
        rows = []
        for slot in range(batch):
            own = pack(range(slot * blocks, (slot + 1) * blocks))
            row = RowAdded(slot, pack(prompt(slot, length)), own, 0, num_prompt_tokens=length)
            rows.append(row)
        chunks = pack(number for slot in range(batch) for number in (slot, length))
        start = clock()
        plan = BatchPlan(1, 0, added=rows, chunks=chunks, states=states(0))
        runner.launch(plan).token_ids()
        after = clock()
        for step in range(1, steps + 1):
            runner.launch(BatchPlan(1, step, states=states(step))).token_ids()
        return after - start, (clock() - after) / steps

    return turn


def llama_turn(path: str, batch: int, length: int, steps: int) -> Turn:
    """Return the turn of llama.cpp, whose steps are what a longer output takes in addition."""
    import xllamacpp

    if batch > 1:
        raise SystemExit("--batch: llama.cpp is measured with 1")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup = path, 2 * (length + steps), True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    params.n_parallel = 1
    server = xllamacpp.Server(params)

    def complete(number: int) -> float:
        request = {"prompt": prompt(0, length), "n_predict": number, "cache_prompt": False}
        request |= {"temperature": 0, "ignore_eos": True}
        start = clock()
        answer = server.handle_completions(request)
        if answer["timings"]["predicted_n"] != number:
            raise SystemExit(f"{path}: got {answer['timings']}, expected {number} tokens")
        return clock() - start

    def turn() -> tuple[float, float]:
        first = complete(1)
        return first, (complete(1 + steps) - first) / steps

    return turn


def hf_turn(name: str, batch: int, length: int, steps: int) -> Turn:
    """Return the turn of transformers' own loop; a name may end in `:bfloat16`."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, _, dtype = name.partition(":")
    torch.set_num_threads(num_threads)
    kind = getattr(torch, dtype or "float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()
    prompts = torch.tensor([prompt(slot, length) for slot in range(batch)])

    @torch.inference_mode()
    def turn() -> tuple[float, float]:
        start = clock()
        out = model(prompts, use_cache=True, logits_to_keep=1)
        after = clock()
        for _ in range(steps):
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(tokens, past_key_values=out.past_key_values, use_cache=True)
        return after - start, (clock() - after) / steps

    return turn


def copy_turn(folder: str, *_: int) -> Turn:
    """Return a turn that copies as many bytes as the weights have, twice: the memory's speed."""
    import torch

    torch.set_num_threads(num_threads)
    num_bytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)

    def copy() -> float:
        start = clock()
        target.copy_(source)
        return clock() - start

    return lambda: (copy(), copy())


def avx2_turn(name: str, batch: int, length: int, steps: int) -> Turn:
    """Return the turn of a worker whose code is compiled for a CPU without AVX-512."""
    from penstock.kernels.cpu import compiled_layers, compiler
    from penstock.models import compiled

    own = compiler.host()
    narrow = own.features.replace("+avx512", "-avx512").replace("+evex512", "-evex512")
    cpu = compiler.target(own.name, narrow, has_wide_registers=False)
    for module in (compiled_layers, compiler, compiled):
        module.host = lambda: cpu  # type: ignore[attr-defined]
    return worker_turn(name, batch, length, steps)


OTHERS = {"llama": llama_turn, "hf": hf_turn, "copy": copy_turn, "avx2": avx2_turn}
"""by their prefix; without one it is a worker's"""


def write_file(folder: Path, path: Path, kind: str) -> None:
    """Write the GGUF file of a checkpoint of one shard, with embedding and head in Q8_0."""
    from safetensors.torch import load_file

    from penstock.launch.gguf import MATRICES
    from tests.launch.extras.gguf_files import add_tensor, add_tokenizer, close, named, new_writer

    config = json.loads((folder / "config.json").read_text())
    writer = new_writer(path, config)
    writer.add_value_length(config["head_dim"])
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    used = {one["id"] for one in tokenizer["added_tokens"]}
    first = len(tokenizer["model"]["vocab"]) + len(used)
    tokenizer["added_tokens"] += [
        {"id": number, "content": f"<|unused_{number}|>", "special": True}
        for number in range(first, config["vocab_size"])
    ]
    add_tokenizer(writer, tokenizer)
    (shard,) = folder.glob("*.safetensors")
    for name, data in named(load_file(shard), config).items():
        is_matrix = any(f".{part}." in name for part in MATRICES)
        add_tensor(writer, name, data, kind if is_matrix else "F32" if data.ndim == 1 else "Q8_0")
    close(writer)


def serve_turns(name: str, sizes: tuple[int, int, int]) -> None:
    """Take a turn for each line of stdin, and print its times."""
    kind, _, rest = name.partition(":")
    take = OTHERS[kind](rest, *sizes) if kind in OTHERS else worker_turn(name, *sizes)
    take()
    print("TURN ready", flush=True)
    for _ in sys.stdin:
        print("TURN", json.dumps(take()), flush=True)


def run(names: list[str], turns: int, sizes: tuple[int, int, int]) -> None:
    """Start the processes, let them take turns and print their times."""
    processes = [_start(name, sizes) for name in names]
    times: list[list[Any]] = [[] for _ in names]
    for _ in range(turns):
        for process, own in zip(processes, times, strict=True):
            own.append(json.loads(_ask(process)))
    for process in processes:
        process.communicate()
    batch, length, _ = sizes
    print("| | prompt ms | best | tokens/s | step ms | best | tokens/s |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for name, own in zip(names, times, strict=True):
        cells = [name]
        for part, number in zip(zip(*own, strict=True), (batch * length, batch), strict=True):
            median, best = statistics.median(part), min(part)
            cells += [f"{median * 1e3:.2f}", f"{best * 1e3:.2f}", f"{number / median:,.0f}"]
        print(f"| {' | '.join(cells)} |")


def _start(name: str, sizes: tuple[int, int, int]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.tools.cpu_speed", "serve", name]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*command, *map(str, sizes)], stdin=pipe, stdout=pipe, text=True)
    _answer(process)
    return process


def _ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()
    return _answer(process)


def _answer(process: subprocess.Popen[str]) -> str:
    """Return the next line that begins with TURN, which other lines of a library do not."""
    assert process.stdout
    for line in process.stdout:
        if line.startswith("TURN "):
            return line.removeprefix("TURN ")
    raise SystemExit(f"{process.args} ended")


def main() -> None:
    """Run one of the commands of this module's description."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    gguf = commands.add_parser("gguf")
    gguf.add_argument("folder", type=Path)
    gguf.add_argument("path", type=Path)
    gguf.add_argument("kind")
    command = commands.add_parser("run")
    command.add_argument("names", nargs="+")
    numbers = {"turns": 8, "batch": 1, "length": 128, "steps": 16, "threads": 1}
    for option, default in numbers.items():
        command.add_argument(f"--{option}", type=int, default=default)
    command.add_argument("--wall", action="store_true")
    serve = commands.add_parser("serve")
    serve.add_argument("name")
    serve.add_argument("sizes", type=int, nargs=3)
    options = parser.parse_args()
    if options.command == "gguf":
        write_file(options.folder, options.path, options.kind)
    elif options.command == "serve":
        serve_turns(options.name, tuple(options.sizes))
    else:
        os.environ[CLOCK] = "wall" if options.wall else "cpu"
        os.environ[THREADS] = str(options.threads)
        run(options.names, options.turns, (options.batch, options.length, options.steps))


if __name__ == "__main__":
    main()
