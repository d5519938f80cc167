"""Makes tests/data/sharded: a model that save_pretrained splits over several safetensors files with an index.

    pip install torch==2.13.0 transformers==5.22.0 safetensors==0.8.0
    python tests/data/make/hf_sharded.py

The embeddings are tied: lm_head.weight is in none of the shards.
"""

import shutil
from itertools import chain

from expect import DATA, tensors_of_safetensors, write_expected
from tiny_gpt2 import tiny_gpt2


def main() -> None:
    folder = DATA / "sharded"
    shutil.rmtree(folder, ignore_errors=True)
    tiny_gpt2().save_pretrained(folder, max_shard_size="4KB")
    shards = sorted(folder.glob("*.safetensors"))
    write_expected("sharded", chain.from_iterable(tensors_of_safetensors(shard) for shard in shards))


if __name__ == "__main__":
    main()
