import torch, wandb
from trainscope import TrainScope, TrainScopeConfig
run = wandb.init(mode="offline", dir="/tmp/i37/wb", project="x")
m = torch.nn.Linear(4, 4); o = torch.optim.AdamW(m.parameters())
wandb.watch(m, log="gradients", log_freq=1)
s = TrainScope(m, o, config=TrainScopeConfig(run_dir="/tmp/i37/tsr")).attach()
for i in range(3):
    l = m(torch.randn(3, 4)).sum(); l.backward(); s.step(l.item(), batch_index=i); o.step(); wandb.log({"loss": l.item()})
s.detach(); wandb.unwatch(m); run.finish(); print("OK")
