"""Fine-tuning of trained weights; the default config of `flaxformer-lite import`.

Data      your own, named at the import or when training starts
Hardware  one GPU, or a CPU for small models
Expected  depends on the model and the data
Command   flaxformer-lite import marian FOLDER --workdir=runs/mine
          flaxformer-lite train --workdir=runs/mine --config.data.dataset=parallel_text
          --config.data.train_files=A,B --config.data.validation_files=C,D
          --config.data.test_files=E,F
"""

from flaxformer_lite.config import default_config


def get_config():
    config = default_config()
    config.data.update(tokens_per_batch=4096)
    config.optim.update(schedule="linear", learning_rate=1e-4, warmup_steps=100)
    config.train.update(num_steps=2000, log_every=10, eval_every=200)
    return config
