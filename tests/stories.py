"""Write TinyStories files for tests: the published formats, with stories of a few words."""

import numpy as np

TEXT = "once upon a time there was a little girl who had a big red ball and she loved to play with it"
WORDS = np.array(TEXT.split())


def story(seed, words):
    """Write so many words in an order of their own."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, words)) + "."


def write_text(folder, names=("TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"), counts=(200, 60)):
    """Write the two text files, and return their folder."""
    place = folder / "tinystories"
    place.mkdir(parents=True, exist_ok=True)
    for part, (name, count) in enumerate(zip(names, counts, strict=True)):
        stories = [story(1000 * part + number, 45) for number in range(count)]
        (place / name).write_text("".join(f"{each}\n<|endoftext|>\n" for each in stories))
    return place


def write_tokens(folder, vocabulary=90, counts=(40_000, 12_000)):
    """Write the two files of uint16 tokens, and return their folder."""
    place = folder / "tinystories"
    place.mkdir(parents=True, exist_ok=True)
    for part, (name, count) in enumerate(zip(("train.bin", "val.bin"), counts, strict=True)):
        np.random.default_rng(part).integers(0, vocabulary, count).astype(np.uint16).tofile(place / name)
    return place


def write_parquet(folder, columns=("text",), counts=(200, 60)):
    """Write the two parts as the Hugging Face data set lays them out, and return their folder."""
    import pyarrow
    from pyarrow import parquet

    place = folder / "tinystories" / "data"
    place.mkdir(parents=True, exist_ok=True)
    names = ("train-00000-of-00001.parquet", "validation-00000-of-00001.parquet")
    for part, (name, count) in enumerate(zip(names, counts, strict=True)):
        stories = [story(1000 * part + number, 45) for number in range(count)]
        parquet.write_table(pyarrow.table(dict.fromkeys(columns, stories)), place / name)
    return place
