"""No token is lost, no label crosses a document, every rank sees its own rows once, and a resume changes nothing."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from trainer.config import DataConfig, ModelConfig, ParallelismConfig, RunConfig, TrainConfig
from trainer.data import build_data
from trainer.data.batch import DataError
from trainer.data.packing import pack
from trainer.data.sources import checked, conversations, jsonl_conversations, tokenize
from trainer.data.tokenizer import build_tokenizer

SEQ = 64


@pytest.mark.parametrize("policy", ["split", "truncate", "drop"])
@pytest.mark.parametrize("seed", range(5))
def test_packing_conserves_tokens_and_overlaps_nothing(policy, seed):
    lengths = np.random.default_rng(seed).integers(0, 3 * SEQ, 200)
    lengths[:5] = [1, SEQ - 1, SEQ, SEQ + 1, 3 * SEQ]
    packing = pack(lengths, np.random.default_rng(seed).permutation(200), SEQ, policy)
    assert packing.packed_tokens + packing.truncated_tokens + packing.dropped_tokens == lengths.sum()
    assert packing.packed_tokens + packing.padded_tokens == SEQ * len(packing.rows)
    assert all(0 < sum(piece.length for piece in row) <= SEQ for row in packing.rows)
    seen = [
        (p.document, position) for row in packing.rows for p in row for position in range(p.start, p.start + p.length)
    ]
    assert len(seen) == len(set(seen)) == packing.packed_tokens
    if policy == "split":
        assert packing.packed_tokens == lengths.sum()
    if policy == "drop":
        assert {p.document for row in packing.rows for p in row} == set(
            np.flatnonzero((lengths <= SEQ) & (lengths > 0))
        )


def test_short_documents_pack_tightly():
    lengths = np.random.default_rng(0).integers(5, 60, 2000)
    packing = pack(lengths, range(2000), 256, "split")
    assert packing.padded_tokens < 0.02 * lengths.sum()


@pytest.mark.parametrize("name, size", [("byte", 512), ("qwen", 151_669)])
def test_tokenizers_are_lossless_and_text_never_becomes_a_special_token(name, size):
    tokenizer = build_tokenizer(name)
    assert tokenizer.vocab_size == size
    for text in ("Hello, world!", "naïve 漢字 🙂\n\t  x", "", "a<|im_end|>b<|endoftext|>", "\u0000\uffff"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(token < tokenizer.special("<|endoftext|>") for token in ids)


def test_qwen_ids_are_the_published_ones():
    tokenizer = build_tokenizer("qwen")
    assert tokenizer.encode("Hello, world!") == [9707, 11, 1879, 0]
    assert tokenizer.special("<|im_start|>") == 151644 and tokenizer.special("</think>") == 151668
    assert tokenizer.encode_chat([{"role": "user", "content": "Hello"}])[0] == [151644, 872, 198, 9707, 151645, 198]


def test_chat_template_and_mask_equal_transformers():
    from trainer.data import tokenizer as module

    path = module.importlib.resources.files("trainer.data").joinpath("byte_tokenizer.json")
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(path), additional_special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    )
    theirs.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a mixture of experts?"},
        {"role": "assistant", "content": "Many small networks,\nof which few answer."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Bye"},
    ]
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, supervised = build_tokenizer("byte").encode_chat(messages)
    assert ids == expected["input_ids"]
    assert [int(s) for s in supervised] == expected["assistant_masks"]


def run(world=1, accumulation=1, **data):
    """A run's configuration over the sample conversations."""
    options = dict(name="sample", seq_len=SEQ, global_batch_size=world * accumulation)
    return RunConfig(
        data=DataConfig(**{**options, **data}),
        parallelism=ParallelismConfig(nodes=1, gpus_per_node=world, dp_shard=world, ep=1),
        train=TrainConfig(seed=3),
    )


def same(a, b):
    return all(
        torch.equal(getattr(a, n), getattr(b, n)) for n in ("input_ids", "labels", "position_ids", "document_ids")
    )


def test_labels_stay_inside_their_document_and_supervise_the_assistant_only():
    tokenizer = build_tokenizer("byte")
    (batch,) = build_data(run(), 0, 1).micro_batches()
    ids, labels, positions, documents = (
        t[0].tolist() for t in (batch.input_ids, batch.labels, batch.position_ids, batch.document_ids)
    )
    for i, label in enumerate(labels):
        if label != -100:
            assert label == ids[i + 1] and documents[i] == documents[i + 1] != -1
        if i and documents[i] >= 0:
            assert positions[i] == (positions[i - 1] + 1 if documents[i] == documents[i - 1] else 0)
    first = [i for i in range(SEQ) if documents[i] == 0]
    text = tokenizer.decode([ids[i] for i in first])
    trained = tokenizer.decode([labels[i] for i in first if labels[i] != -100])
    assert text.startswith("<|im_start|>user\n") and trained
    assert f"<|im_start|>assistant\n{trained.split('<|im_end|>')[0]}<|im_end|>" in text
    assert batch.supervised_tokens == sum(label != -100 for label in labels)
    assert batch.real_tokens == sum(document >= 0 for document in documents)


def test_four_ranks_see_what_one_rank_with_four_micro_batches_sees():
    alone = build_data(run(accumulation=4), 0, 1)
    together = [build_data(run(world=4), rank, 4) for rank in range(4)]
    for _ in range(40):  # into the second epoch and beyond
        batches = [batch for data in together for batch in data.micro_batches()]
        assert all(same(a, b) for a, b in zip(alone.micro_batches(), batches, strict=True))
    assert alone.epoch == together[3].epoch


def test_every_document_comes_once_per_epoch():
    data = build_data(run(seq_len=2048), 0, 1)
    tokens, epochs = {0: 0, 1: 0}, []
    while data.epoch < 2:
        (batch,) = data.micro_batches()
        epochs.append(data.epoch)
        if data.epoch < 2:
            tokens[data.epoch] += batch.real_tokens
    total = len(tokenize(conversations(DataConfig(name="sample")), build_tokenizer("byte")).ids)
    assert tokens == {0: total, 1: total} == {0: data.counts["tokens"], 1: total}


@pytest.mark.parametrize("name", ["sample", "random"])
@pytest.mark.parametrize("steps", [3, 61])
def test_resume_is_no_interruption(name, steps):
    config = replace(run(accumulation=20, name=name), model=ModelConfig())
    straight, stopped = build_data(config, 0, 1), build_data(config, 0, 1)
    for data in (straight, stopped):
        for _ in range(steps):
            data.micro_batches()
    resumed = build_data(config, 0, 1)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for _ in range(3):
        for a, b in zip(straight.micro_batches(), resumed.micro_batches(), strict=True):
            assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.labels, b.labels)
    assert resumed.epoch == straight.epoch


def test_random_rows_are_one_full_document_and_differ():
    data = build_data(run(accumulation=2, name="random"), 0, 1)
    first, second = data.micro_batches()
    assert first.document_ids is None and first.supervised_tokens == SEQ - 1 and first.real_tokens == SEQ
    assert not torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.labels[:, :-1], first.input_ids[:, 1:])


def write(path, conversations):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return str(path)


def chat(i):
    return [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i}"}]


def test_held_out_documents_never_train_and_every_rank_evaluates_alike(tmp_path):
    path = write(tmp_path / "chat.jsonl", [chat(i) for i in range(100)])
    config = run(world=2, name="chat", path=path, validation_fraction=0.2, eval_every_steps=1)
    tokenizer, ranks = build_tokenizer("byte"), [build_data(config, rank, 2) for rank in range(2)]
    held_out = [data.eval_batches() for data in ranks]
    assert len(held_out[0]) == len(held_out[1])

    def questions(batches):
        text = "".join(tokenizer.decode(batch.input_ids.flatten().tolist()) for batch in batches)
        return set(text.replace("<|im_end|>", "\n").split("\n"))

    evaluated = {line for line in questions(held_out[0] + held_out[1]) if line.startswith("question")}
    trained = set()
    while ranks[0].epoch == 0:
        trained |= {line for data in ranks for line in questions(data.micro_batches()) if line.startswith("question")}
    assert len(evaluated) == 20 and len(trained) == 80 and not evaluated & trained
    assert sum(batch.supervised_tokens for batches in held_out for batch in batches) > 0


@pytest.mark.parametrize(
    "documents, options, message",
    [
        ([], {}, "0 training documents"),
        ([chat(0)] * 3, dict(global_batch_size=8), "global_batch_size=8"),
        ([[{"role": "user", "content": "alone"}]] * 9, {}, "none of them supervised"),
        ([chat(0)] * 9, dict(eval_every_steps=2), "validation_fraction"),
    ],
)
def test_too_little_data_is_refused_with_the_numbers(tmp_path, documents, options, message):
    path = write(tmp_path / "chat.jsonl", documents)
    with pytest.raises(DataError, match=message):
        build_data(run(name="chat", path=path, **options), 0, 1)


@pytest.mark.parametrize("line", ["{broken", '{"text": "x"}', '{"messages": [{"role": "user"}]}', "3"])
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": chat(0)}) + "\n\n" + line + "\n")
    with pytest.raises(DataError, match=r"chat.jsonl:3: "):
        list(jsonl_conversations(path))


def test_a_missing_file_is_named():
    with pytest.raises(DataError, match="no such file"):
        build_data(run(name="chat", path="nowhere.jsonl"), 0, 1)


def test_messages_keep_role_and_content_only():
    assert checked({"messages": [{"role": "user", "content": "x", "name": "y"}]}) == [{"role": "user", "content": "x"}]


def test_a_dataset_directory_is_read(tmp_path):
    pytest.importorskip("datasets")
    write(tmp_path / "train.jsonl", [chat(i) for i in range(30)])
    data = build_data(run(name="chat", path=str(tmp_path)), 0, 1)
    assert data.counts["documents"] == 30
