#!/bin/sh
# Fine-tune with veRL's SFT trainer on two GPUs, and resume with the same command after a kill.
#
#     pip install verl==0.9.1 trinity-sync
#     sh run_sft.sh                # kill it at any time and run it again
#     trinity-sync ls ckpts
#
# The variable is all that trinity_sync needs; unset it, and veRL saves by itself again. PPO and GRPO
# take the same one: python -m verl.trainer.main_ppo trainer.default_local_dir=ckpts ...
# Without a GPU: sh run_on_cpu.sh. Arguments are passed on to veRL: sh run_sft.sh model.path=...
set -e
here=$(cd "$(dirname "$0")" && pwd)
test -f train.parquet || python "$here/tiny.py" # writes model/ and train.parquet

switch=trinity_sync.integrations.verl.switch
export VERL_USE_EXTERNAL_MODULES="${VERL_USE_EXTERNAL_MODULES:+$VERL_USE_EXTERNAL_MODULES,}$switch"
exec python -m torch.distributed.run --standalone --nproc_per_node=2 -m verl.trainer.sft_trainer \
  model.path=model data.train_files=train.parquet data.max_length=32 \
  data.train_batch_size=4 data.micro_batch_size_per_gpu=1 data.use_dynamic_bsz=False \
  engine.strategy=fsdp2 optim.lr=1e-3 trainer.total_epochs=4 'trainer.logger=[console]' \
  trainer.default_local_dir=ckpts trainer.save_freq=4 trainer.max_ckpt_to_keep=2 "$@"
