"""What other packages leave behind when they are first used: imported where ranks come from, once for all.

A rank that a call leaves as it found it can take the next one.
"""

import tqdm
import transformers

# The first model adds a method to torch.nn.Module.
transformers.GPT2Model(transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))
# The first bar starts a thread that looks after slow ones, whether or not the bar is shown.
tqdm.tqdm.monitor_interval = 0
