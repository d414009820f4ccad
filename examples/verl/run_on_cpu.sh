#!/bin/sh
# Run run_sft.sh on two CPU cores, from a checkout. veRL 0.9.1 has no support for the CPU: what it
# lacks is in tests/environments/verl/cpu.py, and nothing there concerns saving.
set -e
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(dirname "$(dirname "$here")")
export PYTHONPATH="$checkout:$checkout/examples/demo${PYTHONPATH:+:$PYTHONPATH}"
export VERL_USE_EXTERNAL_MODULES=tests.environments.verl.cpu OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
exec sh "$here/run_sft.sh" trainer.device=cpu data.num_workers=0 \
  model.use_remove_padding=False model.enable_gradient_checkpointing=False \
  +model.override_config.attn_implementation=sdpa engine.use_torch_compile=False \
  +engine.mixed_precision.param_dtype=fp32 +engine.mixed_precision.reduce_dtype=fp32 "$@"
