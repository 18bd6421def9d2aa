"""Parallel layouts of the test model. In: sizes. Out: the flags of a run and of its reference."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from tests.integration.corpus import EOD, VOCABULARY

SEQ_LENGTH = 256
ITERATIONS = 5

MODEL = shlex.split(
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0"
)
DATA = shlex.split(
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --split 80,10,10 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --num-workers 0 "
    "--dataloader-inter-document-masking"
)
TRAINING = shlex.split(
    f"--micro-batch-size 1 --global-batch-size 8 --train-iters {ITERATIONS} --lr 0.01 --min-lr "
    "0.001 "
    "--lr-decay-style constant --log-interval 1 --eval-iters 0 --eval-interval 1000 "
    "--clip-grad 1.0 "
    "--calculate-per-token-loss --seed 5 --no-create-attention-mask-in-dataloader"
)
ON_CPU = shlex.split(
    "--distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm --no-bias-swiglu-fusion "
    "--libra-cpu"
)
assert EOD < VOCABULARY


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the rank grid, and the flags beside them."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    pool: int = 1
    flags: str = ""
    """Flags of the model or the training; the reference has them as well."""
    libra: str = "--libra-block-size 32 --libra-head-split 1 --libra-chunks 2"
    implementation: str = "libra"

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def reference(self) -> Layout:
        """The same model without libra at CP = 1, on as few replicas as its experts allow.

        Parameters are initialized by tensor-parallel rank, stage and expert rank, so those stay.
        """
        return replace(self, cp=1, dp=self.ep, pool=1, libra="", implementation="megatron")

    def command_line(self, corpus: str, *more: str) -> list[str]:
        """The script's flags."""
        sizes = {
            "tensor-model-parallel-size": self.tp,
            "pipeline-model-parallel-size": self.pp,
            "context-parallel-size": self.cp,
            "expert-model-parallel-size": self.ep,
            "libra-pool-size": self.pool,
        }
        words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        if self.vpp > 1:
            words += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        words += ["--context-parallel-impl", self.implementation, "--data-path", corpus]
        words += [*MODEL, *DATA, *TRAINING, *ON_CPU]
        return [*words, *self.flags.split(), *self.libra.split(), *more]
