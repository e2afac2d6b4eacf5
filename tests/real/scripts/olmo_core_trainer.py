# ruff: noqa: E402 - code for the CPU comes before the imports.
"""OLMo-core's Trainer on an OLMo 2 of two layers: its FSDP in bf16 or fp32, prefetching, checkpoints.

No change for a CPU. Bookkeeping runs without a thread, because its queues differ between ranks. Checkpoints are saved
in the foreground, because a background save adds a metric at the step at which it ends, which differs between ranks.
Either would make ranks wait for different collectives forever, also on FSDP2. A stub replaces cached_path, which
fetches from clouds and needs their packages. The package requires an older torch.
"""

import os
import sys
import types

cached_path, schemes = types.ModuleType("cached_path"), types.ModuleType("cached_path.schemes")
cached_path.cached_path = lambda path, **_: path
schemes.S3Client = schemes.SchemeClient = type("Client", (), {"recoverable_errors": ()})
schemes.add_scheme_client = lambda *_: None
sys.modules |= {"cached_path": cached_path, "cached_path.schemes": schemes}

import numpy as np
import torch.distributed as dist
from olmo_core.config import DType
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig
from olmo_core.optim import AdamWConfig, ConstantScheduler
from olmo_core.train import Duration, TrainerConfig, prepare_training_environment, teardown_training_environment
from olmo_core.train.callbacks import Callback, CheckpointerCallback
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig

import report


class Recorder(Callback):
    values = []

    def log_metrics(self, step, metrics):
        self.values += [metrics[name] for name in ("train/CE loss", "optim/total grad norm") if name in metrics]


def main() -> None:
    prepare_training_environment(seed=7, backend="gloo", shared_filesystem=True)
    tokens = f"{sys.argv[1]}.tokens.npy"
    if os.environ["RANK"] == "0":
        ((np.arange(4096) ** 2 * 7 + 1) % 97).astype(np.uint16).tofile(tokens)
    dist.barrier()
    tokenizer = TokenizerConfig(vocab_size=128, eos_token_id=0, pad_token_id=1)

    def make(steps):
        block = TransformerBlockType.reordered_norm
        model = TransformerConfig.llama_like(
            vocab_size=128,
            n_layers=2,
            d_model=32,
            n_heads=2,
            qk_norm=True,
            block_name=block,
        )
        dataset = NumpyFSLDatasetConfig(
            paths=[tokens], sequence_length=16, tokenizer=tokenizer, work_dir=f"{sys.argv[1]}.work"
        ).build()
        modules = TransformerTrainModuleConfig(
            rank_microbatch_size=32,
            max_sequence_length=16,
            optim=AdamWConfig(lr=1e-2),
            dp_config=TransformerDataParallelConfig(
                name=DataParallelType.fsdp,
                param_dtype=DType.bfloat16 if sys.argv[2] == "bf16" else None,
                prefetch_factor=1,
            ),
            max_grad_norm=1.0,
            scheduler=ConstantScheduler(),
        ).build(model.build(init_device="meta"))
        loader = NumpyDataLoaderConfig(global_batch_size=128, seed=0, num_workers=0).build(
            dataset, dp_process_group=modules.dp_process_group
        )
        trainer = TrainerConfig(
            save_folder=sys.argv[1] + ".saved",
            save_overwrite=False,
            metrics_collect_interval=1,
            async_bookkeeping=False,
            max_duration=Duration.steps(steps),
            callbacks={"checkpointer": CheckpointerCallback(save_interval=4, save_async=False), "recorder": Recorder()},
        ).build(modules, loader)
        return modules, trainer

    modules, trainer = make(8)
    trainer.fit()
    values = trainer.callbacks["recorder"].values
    report.write([*values, *(p.full_tensor().double().sum().item() for p in modules.model.parameters())], modules.model)
    teardown_training_environment()


if __name__ == "__main__":
    main()
