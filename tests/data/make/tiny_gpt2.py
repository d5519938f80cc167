"""The model that the Hugging Face scripts beside this one save: a GPT-2 of two layers with tied embeddings."""

from transformers import GPT2Config, GPT2LMHeadModel, set_seed


def tiny_gpt2() -> GPT2LMHeadModel:
    set_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=8,
        n_head=2,
        n_positions=16,
        vocab_size=32,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    return GPT2LMHeadModel(config)
