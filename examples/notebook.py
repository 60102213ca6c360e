# %% [markdown]
# # A model that three peers train, from Python
#
# Cells of a notebook: editors that know `# %%` run them one by one, `python examples/notebook.py` runs them all. One
# peer founds the run, one hosts the model's only stage, one trains; each is a process of its own on this machine.
# Anybody else could join with the invite, from anywhere, while it runs.

# %%
import peers

run = {"preset": "tiny", "stages": 1, "hosts": 1, "trainers": 1, "steps": 30}  # the options of `swarm new`
text = None  # what comes with Python; a file or a directory of yours in its place
home = None  # where this machine keeps runs and identities: $SWARM_HOME, else ~/.local/share/swarm

# %% [markdown]
# `found` and `join` return at once. At its end the block waits for the run, and the callback is called here meanwhile.
# To stop, interrupt the cell: the peers leave in order, and what they have learnt is kept.

# %%
steps = []


def show(step):
    steps.append(step)
    print(f"step {step.number}: loss {step.loss:.3f}, {step.tokens:,} tokens in {step.seconds:.1f} s")


with (
    peers.found(**run, home=home) as founder,
    peers.join(founder.invite, role="stage", home=home),
    peers.join(founder.invite, role="trainer", data=text, home=home) as trainer,
):
    print(f"to take part elsewhere: swarm join {founder.invite}")
    trainer.on_step(show)

# %% [markdown]
# The newest checkpoint is an ordinary module of torch.

# %%
import torch

model = peers.load(trainer.run, home=home)
tokenizer = peers.load_tokenizer(trainer.run, home=home)
prompt = torch.tensor([tokenizer.encode("The for statement")])
with torch.no_grad():
    likely = model.logits(model(prompt))[0, -1].softmax(0).topk(5)
for share, token in zip(likely.values.tolist(), likely.indices.tolist(), strict=True):
    print(f"{share:6.1%}  {tokenizer.decode([token])!r}")
print(tokenizer.decode(model.generate(prompt[0], 40, seed=0, temperature=0.8).tolist()))
