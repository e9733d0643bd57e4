"""One rank of a tensor-parallel group: `python -m tests.models.tp_rank RANK SIZE …`.

Arguments: rank, size, rendezvous, output file, checkpoint folders. Rank 0 writes the logits of
every checkpoint to the output file, by folder, also with memory that the ranks share ("-shared");
of one with experts also what they are if each rank has whole ones ("-ep").
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock.kernels.extras import use_rank_memory
from penstock.models.tensor_parallel import TensorParallel
from penstock.protocol.checkpoint import read_model_config
from tests.models.forward import load_model, prefill_logits, random_prompts

NUM_ELEMENTS = 171 * 128
"""of the activations; a rank's logits may be more"""


def main() -> None:
    rank, size, rendezvous, out, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    tp = TensorParallel.join(rendezvous, int(rank), int(size))
    logits = {}
    for folder in folders:
        config = read_model_config(Path(folder))
        prompts = random_prompts(config.vocab_size, 1, 30, 140)
        logits[folder] = prefill_logits(load_model(Path(folder), tp), prompts)
        if config.expert_count:
            model = load_model(Path(folder), tp, expert_parallel=True)
            logits[f"{folder}-ep"] = prefill_logits(model, prompts)
    use_rank_memory()
    tp.reserve(NUM_ELEMENTS, torch.float32)
    assert tp.shared
    for folder in folders:
        prompts = random_prompts(read_model_config(Path(folder)).vocab_size, 1, 30, 140)
        logits[f"{folder}-shared"] = prefill_logits(load_model(Path(folder), tp), prompts)
    if tp.rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in logits.items()}, out)


if __name__ == "__main__":
    main()
