"""No token is lost, no label crosses a document, every rank sees its own rows once, and a resume changes nothing."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from trainer.config import ConfigError, DataConfig, ModelConfig, ParallelismConfig, RunConfig, TrainConfig
from trainer.data import Batch, DataError, build_data, build_tokenizer
from trainer.data.batch import starts_of
from trainer.data.packing import pack
from trainer.data.sources import conversations, tokenize

SEQ = 64
TENSORS = ("input_ids", "labels", "position_ids", "document_ids")


def run(world=1, accumulation=1, micro=1, model=None, seed=3, **data):
    """A run's configuration; by default over the sample conversations."""
    options = {"name": "sample", "seq_len": SEQ, "micro_batch_size": micro}
    return RunConfig(
        model=ModelConfig(**(model or {})),
        data=DataConfig(**{**options, "global_batch_size": world * accumulation * micro, **data}),
        parallelism=ParallelismConfig(nodes=1, gpus_per_node=world, dp_shard=world, ep=1),
        train=TrainConfig(seed=seed),
    )


def write(path, conversations):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return str(path)


def chat(i, words=1):
    return [{"role": "user", "content": f"question {i};"}, {"role": "assistant", "content": f"answer {i};" * words}]


@pytest.fixture
def small(tmp_path):
    """40 documents of 30 to 200 tokens with one name each: an epoch of some 60 rows."""
    return write(tmp_path / "small.jsonl", [chat(i, 1 + i % 11) for i in range(40)])


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in TENSORS)


def questions(batch: Batch) -> list[str]:
    """The names of the documents that begin in this batch."""
    text = build_tokenizer("byte").decode(batch.input_ids.flatten().tolist())
    return [line.split("<|im_end|>")[0] for line in text.split("<|im_start|>user\n")[1:]]


# Packing


@pytest.mark.parametrize("policy", ["split", "truncate", "drop"])
@pytest.mark.parametrize("seed", range(5))
def test_packing_conserves_tokens_and_overlaps_nothing(policy, seed):
    lengths = np.random.default_rng(seed).integers(0, 3 * SEQ, 200)
    lengths[:5] = [1, SEQ - 1, SEQ, SEQ + 1, 3 * SEQ]
    packing = pack(lengths, np.random.default_rng(seed).permutation(200), SEQ, policy)
    assert packing.packed_tokens + packing.truncated_tokens + packing.dropped_tokens == lengths.sum()
    assert packing.packed_tokens + packing.padded_tokens == SEQ * len(packing)
    filled = np.add.reduceat(packing.length, packing.rows[:-1])
    assert ((0 < filled) & (filled <= SEQ)).all() and packing.rows[-1] == len(packing.length)
    pieces = list(zip(packing.document.tolist(), packing.start.tolist(), packing.length.tolist(), strict=True))
    seen = Counter((d, position) for d, start, length in pieces for position in range(start, start + length))
    limit = {"split": lengths, "truncate": np.minimum(lengths, SEQ), "drop": lengths * (lengths <= SEQ)}[policy]
    assert seen == Counter((d, position) for d in range(200) for position in range(limit[d]))


@pytest.mark.parametrize(
    "policy, rows, truncated, dropped", [("split", 7, 0, 0), ("truncate", 4, 129, 0), ("drop", 2, 0, 257)]
)
def test_the_border_lengths(policy, rows, truncated, dropped):
    packing = pack(np.array([1, SEQ - 1, SEQ, SEQ + 1, 3 * SEQ]), np.arange(5), SEQ, policy)
    assert (len(packing), packing.truncated_tokens, packing.dropped_tokens) == (rows, truncated, dropped)


def test_nothing_packs_to_nothing():
    assert len(pack(np.array([], int), np.array([], int), SEQ, "split")) == 0
    assert len(pack(np.array([2 * SEQ]), np.array([0]), SEQ, "drop")) == 0


@pytest.mark.parametrize("seq_len", [128, 256, 2048])
def test_short_documents_pack_tightly(seq_len):
    lengths = np.random.default_rng(0).integers(5, 100, 5000)
    packing = pack(lengths, np.arange(5000), seq_len, "split")
    assert packing.padded_tokens < 0.02 * lengths.sum()


# Rows


@pytest.mark.parametrize("policy", ["split", "truncate", "drop"])
def test_rows_say_what_the_documents_say(small, policy):
    """Rebuild every document from the rows of an epoch; labels, positions and padding follow from it."""
    config = run(name="chat", path=small, long_documents=policy)
    data = build_data(config, 0, 1)
    tokenizer = build_tokenizer("byte")
    counts, supervised, padded, texts = data.counts, 0, 0, []
    for _ in range(counts["rows"]):
        (batch,) = data.micro_batches()
        ids, labels, positions, documents = (getattr(batch, name)[0].tolist() for name in TENSORS)
        for i, (label, document) in enumerate(zip(labels, documents, strict=True)):
            starts = i == 0 or documents[i - 1] != document
            assert positions[i] == (0 if document == -1 or starts else positions[i - 1] + 1)
            if label != -100:
                assert label == ids[i + 1] and document == documents[i + 1] != -1
            if document == -1:
                assert ids[i] == tokenizer.special("<|endoftext|>") and label == -100
            elif starts:
                texts.append("")
            texts[-1] += tokenizer.decode(ids[i : i + 1]) if document != -1 else ""
        assert all(after in (before, before + 1, -1) for before, after in pairwise(documents))
        assert batch.supervised_tokens == sum(label != -100 for label in labels)
        assert batch.real_tokens == sum(document != -1 for document in documents)
        supervised, padded = supervised + batch.supervised_tokens, padded + documents.count(-1)
    assert (data.epoch, padded, supervised) == (0, counts["padded_tokens"], counts["supervised_tokens"])
    documents = tokenize(conversations(config.data), tokenizer)
    kept = {"split": SEQ * 99, "truncate": SEQ, "drop": SEQ}[policy]
    expected = Counter()
    for first, last in pairwise(documents.starts):
        if policy != "drop" or last - first <= SEQ:
            whole = documents.ids[first:last][:kept].tolist()
            expected.update(tokenizer.decode(whole[i : i + SEQ]) for i in range(0, len(whole), SEQ))
    assert Counter(texts) == expected
    if policy == "split":  # every target but those behind a cut
        assert supervised + counts["targets_lost_at_cuts"] == documents.supervised.sum()


def test_what_is_supervised_is_the_assistants_answer(small):
    data, tokenizer = build_data(run(name="chat", path=small, seq_len=256), 0, 1), build_tokenizer("byte")
    answers = Counter()
    for _ in range(data.counts["rows"]):
        (batch,) = data.micro_batches()
        labels = batch.labels[batch.labels != -100].tolist()
        answers.update(tokenizer.decode(labels).split("<|im_end|>")[:-1])
    assert answers == Counter(chat(i, 1 + i % 11)[1]["content"] for i in range(40))


def test_random_rows_are_one_full_document_and_never_repeat():
    data = build_data(run(accumulation=2, name="random", model={"vocab_size": 151_936}), 0, 1)
    batches = [batch for _ in range(50) for batch in data.micro_batches()]
    for batch in batches:
        assert batch.document_ids is None and batch.supervised_tokens == SEQ - 1 and batch.real_tokens == SEQ
        assert torch.equal(batch.labels[:, :-1], batch.input_ids[:, 1:]) and batch.labels[0, -1] == -100
        assert torch.equal(batch.position_ids[0], torch.arange(SEQ))
    ids = torch.cat([batch.input_ids for batch in batches])
    assert len(ids.unique(dim=0)) == 100 and 0 <= ids.min() and 150_000 < ids.max() < 151_936
    assert ids.double().mean() == pytest.approx(151_935 / 2, rel=0.05)


def test_random_documents_are_packed_without_a_label_across_a_border():
    data = build_data(run(name="random", document_len=10), 0, 1)
    (batch,) = data.micro_batches()
    assert batch.document_ids[0].tolist() == [i // 10 for i in range(SEQ)]
    assert batch.position_ids[0].tolist() == [i % 10 for i in range(SEQ)]
    assert batch.document_starts.tolist() == [*range(0, SEQ, 10), SEQ]
    inside = torch.tensor([i % 10 != 9 and i != SEQ - 1 for i in range(SEQ)])
    assert torch.equal(batch.labels[0] != -100, inside)
    assert torch.equal(batch.labels[0, :-1][inside[:-1]], batch.input_ids[0, 1:][inside[:-1]])
    assert batch.supervised_tokens == data.counts["supervised_tokens"] == inside.sum()
    assert data.counts["documents"] == -(-SEQ // 10)


def test_documents_start_where_the_id_changes_and_where_a_row_begins():
    ids = torch.tensor([[0, 0, 1, 2, -1, -1], [0, 0, 0, 0, 0, 0]])
    assert starts_of(ids).tolist() == [0, 2, 3, 4, 6, 12]
    assert starts_of(ids).dtype == torch.int32


# Ranks, epochs, resume


@pytest.mark.parametrize("world, accumulation", [(4, 1), (2, 2)])
@pytest.mark.parametrize("micro", [1, 3])
def test_ranks_see_what_one_rank_with_four_micro_batches_sees(small, micro, world, accumulation):
    alone = build_data(run(accumulation=4, micro=micro, name="chat", path=small), 0, 1)
    config = run(world, accumulation, micro, name="chat", path=small)
    together = [build_data(config, rank, world) for rank in range(world)]
    while alone.epoch < 2:
        rounds = zip(*(data.micro_batches() for data in together), strict=True)  # micro-batch m of every rank
        expected = alone.micro_batches()
        assert len(expected) == 4 and expected[0].input_ids.shape == (micro, SEQ)
        assert all(same(a, b) for a, b in zip(expected, sum(rounds, ()), strict=True))
        assert {data.epoch for data in together} == {alone.epoch}
        assert all(data.state_dict() == alone.state_dict() for data in together)


def test_every_document_comes_once_per_epoch_over_all_ranks(small):
    """7 ranks and epochs of 11 rows, so that epochs end within steps; documents fit into a row here."""
    ranks = [build_data(run(world=7, name="chat", path=small, seq_len=256), rank, 7) for rank in range(7)]
    assert ranks[0].counts["rows"] % 7
    seen = []
    while len(seen) < 5 * 40:
        seen += [name for data in ranks for batch in data.micro_batches() for name in questions(batch)]
    epochs = [seen[i : i + 40] for i in range(0, 200, 40)]
    assert all(sorted(epoch) == sorted(f"question {i};" for i in range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_without_shuffle_the_order_is_that_of_the_file(small):
    data = build_data(run(name="chat", path=small, seq_len=256, shuffle=False), 0, 1)
    first = data.micro_batches()[0]
    for _ in range(data.counts["rows"] - 1):
        data.micro_batches()
    assert questions(first)[0] == "question 0;" and same(first, data.micro_batches()[0]) and data.epoch == 1


@pytest.mark.parametrize("name", ["chat", "random"])
@pytest.mark.parametrize("steps", [0, 1, 3, 4, 7, 20])
def test_resume_is_no_interruption(small, name, steps):
    """Up to some six epochs: stops at a start, inside of epochs, and behind a step that took rows of two."""
    config = run(accumulation=20, name=name, path=small if name == "chat" else "")
    straight, stopped = build_data(config, 0, 1), build_data(config, 0, 1)
    for data in (straight, stopped):
        for _ in range(steps):
            data.micro_batches()
    resumed = build_data(config, 0, 1)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert resumed.state_dict() == straight.state_dict() and resumed.counts == straight.counts
    for _ in range(5):
        for a, b in zip(straight.micro_batches(), resumed.micro_batches(), strict=True):
            assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.labels, b.labels)
        assert resumed.epoch == straight.epoch
    assert name == "random" or straight.epoch >= 1


def test_a_resume_may_change_the_number_of_ranks(small):
    alone = build_data(run(accumulation=4, name="chat", path=small), 0, 1)
    for _ in range(5):
        alone.micro_batches()
    pair = [build_data(run(world=2, accumulation=2, name="chat", path=small), rank, 2) for rank in range(2)]
    for data in pair:
        data.load_state_dict(alone.state_dict())
    batches = zip(*(data.micro_batches() for data in pair), strict=True)
    assert all(same(a, b) for a, b in zip(alone.micro_batches(), sum(batches, ()), strict=True))


def test_a_position_that_the_data_does_not_have_is_refused(small):
    with pytest.raises(DataError, match="row 4000 of epoch 1"):
        build_data(run(name="chat", path=small), 0, 1).load_state_dict({"epoch": 1, "row": 4000})


def fingerprint(seed: int) -> str:
    digest = hashlib.sha256()
    for name in ("sample", "random"):
        data = build_data(run(accumulation=3, name=name, validation_fraction=0.1, seed=seed), 0, 1)
        for batch in [*data.micro_batches(), *data.micro_batches(), *data.eval_batches()[:3]]:
            digest.update(batch.input_ids.numpy().tobytes() + batch.labels.numpy().tobytes())
    return digest.hexdigest()


def test_another_process_sees_the_same_and_another_seed_does_not():
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_data as t; print(t.fingerprint(3))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    theirs = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert theirs.stdout.strip() == fingerprint(3) != fingerprint(4)


# The held-out split


def test_held_out_documents_never_train_and_every_rank_evaluates_alike(tmp_path):
    path = write(tmp_path / "chat.jsonl", [chat(i) for i in range(100)] * 2)  # everything twice
    ranks = [
        build_data(run(world=3, name="chat", path=path, validation_fraction=0.2, eval_every_steps=1), rank, 3)
        for rank in range(3)
    ]
    held_out = [data.eval_batches() for data in ranks]
    assert len({len(batches) for batches in held_out}) == 1
    evaluated = Counter(name for batches in held_out for batch in batches for name in questions(batch))
    trained = Counter()
    while ranks[0].epoch == 0:
        trained.update(name for data in ranks for batch in data.micro_batches() for name in questions(batch))
    assert len(evaluated) == 20 and len(trained) == 80 and not set(evaluated) & set(trained)
    assert ranks[0].counts["held_out_documents"] == 40 and ranks[0].counts["documents"] == 160
    assert all(same(a, b) for a, b in zip(ranks[1].eval_batches(), held_out[1], strict=True))


@pytest.mark.parametrize("world, micro", [(1, 1), (3, 2), (8, 1)])
def test_evaluation_covers_the_held_out_targets_once_on_any_number_of_ranks(small, world, micro):
    config = run(world=world, micro=micro, name="chat", path=small, validation_fraction=0.15)
    ranks = [build_data(config, rank, world) for rank in range(world)]
    batches = [data.eval_batches() for data in ranks]
    assert len({len(mine) for mine in batches}) == 1
    assert all(batch.input_ids.shape == (micro, SEQ) for mine in batches for batch in mine)
    assert (
        sum(batch.supervised_tokens for mine in batches for batch in mine)
        == ranks[0].counts["held_out_supervised_tokens"]
        > 0
    )


def test_random_data_is_evaluated_on_other_rows():
    data = build_data(run(accumulation=4, name="random", validation_fraction=0.1), 0, 1)
    trained, evaluated = data.micro_batches(), data.eval_batches()
    assert len(evaluated) == 4
    assert not any(torch.equal(a.input_ids, b.input_ids) for a in trained for b in evaluated)


# Refusals and warnings


@pytest.mark.parametrize(
    "documents, options, message",
    [
        ([], {}, "0 training documents"),
        ([chat(0)] * 3, {"seq_len": 2048}, r"3 training documents .* 90 tokens: 1 rows .* 2048 tokens"),
        (
            [chat(0)] * 3,
            {"global_batch_size": 8},
            "3 training documents .* 2 rows .* data.global_batch_size=8 rows = 512 tokens",
        ),
        ([chat(0, 50)] * 9, {"long_documents": "drop"}, "dropped as longer"),
        ([[{"role": "user", "content": "alone"}]] * 9, {}, "none of them supervised"),
        ([chat(0)] * 9, {"eval_every_steps": 2}, "validation_fraction"),
        ([chat(0)], {"validation_fraction": 0.5}, r"0 training documents \(1 more held out\)"),
        ([chat(0)] * 9, {"micro_batch_size": 2}, "no multiple of data.micro_batch_size=2"),
        ([chat(0)] * 9, {"name": "random", "path": "", "global_batch_size": 0}, "no multiple"),
    ],
)
def test_too_little_data_is_refused_with_the_numbers(tmp_path, documents, options, message):
    path = write(tmp_path / "chat.jsonl", documents)
    with pytest.raises(ConfigError, match=message):
        build_data(run(**{"name": "chat", "path": path, **options}), 0, 1)


def test_a_vocabulary_larger_than_the_models_is_refused():
    with pytest.raises(DataError, match="512 ids, more than model.vocab_size=500"):
        build_data(run(model={"vocab_size": 500}), 0, 1)


def test_documents_that_teach_nothing_are_counted_and_warned_about(tmp_path):
    """Six: two without an answer, one whose answer is cut off, and one that is dropped under another policy."""
    silent = [{"role": "user", "content": "x" * 20}]
    late = [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "y"}]
    path = write(tmp_path / "chat.jsonl", [silent, chat(1), late, chat(2), silent, chat(3)])
    truncated = build_data(run(name="chat", path=path, long_documents="truncate"), 0, 1)
    assert truncated.counts["documents_without_supervised_tokens"] == 3
    assert any("3 documents (50.0%)" in line for line in truncated.describe())
    dropped = build_data(run(name="chat", path=path, long_documents="drop"), 0, 1)
    assert dropped.counts["documents_without_supervised_tokens"] == 2 and dropped.counts["documents_dropped"] == 1
    assert dropped.counts["dropped_tokens"] > 200 and any("dropped (data.long" in line for line in dropped.describe())


@pytest.mark.parametrize("name", ["sample", "random"])
def test_counts_have_the_same_names_for_every_source(name):
    data = build_data(run(name=name), 0, 1)
    data.micro_batches()
    counts = data.counts
    assert counts["rows"] * SEQ == counts["padded_tokens"] + counts["tokens"] and counts["supervised_tokens"] > 0
    assert counts["truncated_tokens"] == counts["dropped_tokens"] == 0 < counts["documents"]
    assert data.describe()[0].startswith("data: ")


# Speed, in CPU seconds: a busy machine does not break it


def cpu_seconds(function) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def test_data_is_ready_at_once():
    tokenizer = build_tokenizer("byte")
    corpus = list(conversations(DataConfig(name="sample")))
    assert cpu_seconds(lambda: tokenize(corpus, tokenizer)) < 1.0
    lengths = tokenize(corpus, tokenizer).lengths
    assert cpu_seconds(lambda: pack(lengths, np.arange(len(lengths)), 256, "split")) < 0.1
    big = run(world=32, name="random", seq_len=16_384, model={"vocab_size": 151_936})
    assert cpu_seconds(lambda: build_data(big, 0, 32)) < 0.05
    random = build_data(big, 31, 32)
    assert cpu_seconds(random.micro_batches) < 0.05  # its own row, not those of the others
    packed = build_data(run(accumulation=4, seq_len=16_384), 0, 1)
    assert cpu_seconds(packed.micro_batches) < 0.1
