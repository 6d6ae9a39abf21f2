#!/usr/bin/env bash
# zstd: exponents of bfloat16 come out larger by levels 3 to 9 than by level 1, by 5 to 12 %.
#
# zstandard 0.25.0 (zstd 1.5.7), numpy 2.3.5, ml-dtypes 0.5.4, Python 3.11. The upper bytes, sign
# and exponent, of 1,048,576 random numbers: of one normal distribution, and of one with another
# deviation in each of 128 channels. Blocks of 128 KiB, each for itself; shown: size over size.
#
# Guess: a higher level is never larger by more than a hair. All that can be won is the entropy of
#        single bytes; Huffman codes get there at each level, so that levels differ in time only.
# Seen:  such bytes have short matches by chance. Levels 3 to 9 take them, and each costs more than
#        its bytes in Huffman codes do. The default, 3, is the worst or next to it. Level 1 without
#        short matches (min_match=7, hash_log=6) is what levels 15 and 19 get, and was faster than
#        level 1: 5 ms a MiB here, level 3 15 ms, level 19 2,700 ms.
#
#            normal: 0.328 entropy, 0.380 1, 0.410 3, 0.405 6, 0.399 9, 0.336 15, 0.336 19
#            normal, level 1 without short matches: 0.336
#            channels: 0.398 entropy, 0.418 1, 0.461 3, 0.469 6, 0.468 9, 0.407 15, 0.406 19
#            channels, level 1 without short matches: 0.406
#
# For lossless coding of KV blocks with the bytes split: the default loses a tenth of the upper half
# and two thirds of the speed. "Level 9 wins little, so there is little to win" is wrong.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install ml-dtypes==0.5.4 numpy==2.3.5 zstandard==0.25.0
cat >ask.py <<'PYTHON'
import math

import ml_dtypes
import numpy as np
import zstandard

random = np.random.default_rng(1)
normal = random.standard_normal((8192, 128))
channels = normal * np.exp(random.standard_normal(128))
few_matches = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)


def size(data, **options):
    packer = zstandard.ZstdCompressor(**options)
    blocks = [data[at : at + 131072] for at in range(0, len(data), 131072)]
    packed = [packer.compress(block) for block in blocks]
    assert [zstandard.decompress(block) for block in packed] == blocks
    return f"{sum(map(len, packed)) / len(data):.3f}"


assert zstandard.ZSTD_VERSION == (1, 5, 7)
for title, numbers in ("normal", normal), ("channels", channels):
    halves = numbers.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint8)
    upper = halves.reshape(-1, 2)[:, 1].tobytes()
    shares = np.bincount(np.frombuffer(upper, np.uint8)) / len(upper)
    bits = -sum(share * math.log2(share) for share in shares if share)
    sizes = [f"{size(upper, level=level)} {level}" for level in (1, 3, 6, 9, 15, 19)]
    print(f"{title}: {bits / 8:.3f} entropy,", ", ".join(sizes))
    few = size(upper, compression_params=few_matches)
    print(f"{title}, level 1 without short matches: {few}")
PYTHON
venv/bin/python ask.py | tee seen
cat >expected <<'TEXT'
normal: 0.328 entropy, 0.380 1, 0.410 3, 0.405 6, 0.399 9, 0.336 15, 0.336 19
normal, level 1 without short matches: 0.336
channels: 0.398 entropy, 0.418 1, 0.461 3, 0.469 6, 0.468 9, 0.407 15, 0.406 19
channels, level 1 without short matches: 0.406
TEXT
diff expected seen && echo "as written above"
