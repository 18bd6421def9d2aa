"""Pretrain a GPT with the megatron-core wheel alone. In: Megatron's, libra's flags. Out: a model.

    torchrun --nproc-per-node 4 scripts/pretrain_gpt.py --context-parallel-impl libra ...
    torchrun --nproc-per-node 4 -m megatron_libra.run --config RUN.yaml scripts/pretrain_gpt.py

Megatron's own pretrain_gpt.py is not in the wheel; this one trains on packed GPT data (.bin/.idx
files, mock data) or SFT jsonl. Its only line of libra is `prepare()`; under the launcher that is
a no-op.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_libra.integration.launch import finish, prepare

if __name__ == "__main__":
    prepare()

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

KEYS = (
    *("tokens", "labels", "loss_mask", "position_ids", "attention_mask"),
    *("cu_seqlens", "cu_seqlens_padded", "max_seqlen"),
)


def is_packed() -> bool:
    """Whether batches bring the boundaries of the samples inside a packed sequence."""
    args = get_args()
    return args.sft or args.dataloader_inter_document_masking


def get_batch(data_iterator: Any, vp_stage: int | None) -> dict[str, Any]:
    """Megatron's own batch: broadcast to the tensor-parallel ranks, cut by context parallelism."""
    args = get_args()
    if not is_packed() and not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(KEYS)
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        loaded = next(data_iterator)
        batch = {
            key: loaded[key].cuda(non_blocking=True) if key in loaded else None for key in KEYS
        }
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=is_packed(),
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if not is_first_or_last_pipeline_stage(vp_stage):
        return batch
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        use_per_sequence_balancing=not args.sft,
    )


def packed_params(batch: dict[str, Any]) -> PackedSeqParams | None:
    """Megatron's packed-sequence parameters, if the batch is packed."""
    if batch["cu_seqlens"] is None:
        return None
    boundaries = batch["cu_seqlens"].squeeze(0)
    update_seqlen_stats_from_cu_seqlens(boundaries)
    longest = int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor, model: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss and number of tokens of a microbatch, and both for Megatron's log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """One microbatch through one model chunk, as Megatron does it without libra."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    params = packed_params(batch)
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=params,
    )
    return output, partial(loss_func, batch["loss_mask"], model=model)


def has_data(vp_stage: int | None) -> bool:
    """Ranks that load data; with packed data Megatron needs the boundaries on every stage."""
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    return is_packed() or is_first_or_last_pipeline_stage(vp_stage)


def dataset_config() -> GPTDatasetConfig:
    """The dataset settings among Megatron's flags."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        inter_document_masking=args.dataloader_inter_document_masking,
    )


def train_valid_test_datasets_provider(
    num_samples: list[int], vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """Train, validation and test sets of the wanted sizes; None on ranks without data."""
    args = get_args()
    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0(f"> building {kind.__name__} ...")
    build = BlendedMegatronDatasetBuilder(
        kind, num_samples, partial(has_data, vp_stage), dataset_config()
    )
    return tuple(build.build())


train_valid_test_datasets_provider.is_distributed = True


def main() -> None:
    """Parse, build, train."""
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
    finish()
