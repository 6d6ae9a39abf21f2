"""A torch tensor on a GPU as KV pool, in the order of torch's streams: needs an NVIDIA GPU."""

import hashlib

import pytest

import ripieno

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

LAYERS, BLOCKS, TOKENS, HIDDEN = 8, 64, 16, 1024
SHAPE = ripieno.Shape(
    layers=LAYERS, segments=2, object_bytes=TOKENS * HIDDEN * 2, block_tokens=TOKENS
)
KEYS = [hashlib.sha256(str(number).encode()).digest() for number in range(24)]


def pool_of(fill):
    """Returns a KV cache on the GPU, [row, block, token, hidden], and the pool of its memory."""
    size = (SHAPE.rows, BLOCKS, TOKENS, HIDDEN)
    kv = torch.full(size, fill, dtype=torch.bfloat16, device="cuda:0")
    torch.cuda.synchronize()
    return kv, ripieno.Pool.contiguous(kv, SHAPE)


def layer_of(kv, layer):
    return kv[layer * SHAPE.segments : (layer + 1) * SHAPE.segments]


def forward(kv, blocks, weights, before):
    """Runs layers that read these blocks of the KV cache; before(layer) precedes each. Returns the
    output of each layer."""
    x = torch.ones(len(blocks) * TOKENS, HIDDEN, dtype=torch.bfloat16, device=kv.device)
    outputs = []
    for layer in range(LAYERS):
        before(layer)
        keys, values = layer_of(kv, layer)[:, blocks].reshape(2, -1, HIDDEN)
        x = torch.softmax(x @ keys.T / HIDDEN, dim=-1) @ values + x @ weights[layer]
        outputs.append(x)
    return torch.stack(outputs)


@pytest.mark.parametrize("route", ["direct", "staged"])
@pytest.mark.parametrize("dram", [None, "64MiB"])
def test_layers_are_in_the_order_of_the_streams(tmp_path, route, dram):
    torch.manual_seed(1)
    stream = torch.cuda.Stream()
    size = (LAYERS, HIDDEN, HIDDEN)
    weights = torch.randn(size, dtype=torch.bfloat16, device="cuda:0") / HIDDEN
    at = list(range(3, 3 + len(KEYS)))
    (rank,) = ripieno.prepare(tmp_path / "kv", SHAPE, capacity="64MiB")

    kv, pool = pool_of(0)
    options = {"route": route, "dram": dram}
    with ripieno.Catalog(tmp_path / "kv") as catalog:
        namespace = catalog.namespace(ripieno.Namespace())
        with ripieno.Plane(tmp_path / "kv", rank, SHAPE, pool, **options) as plane:
            assert plane.route == route
            write = catalog.begin(namespace, KEYS)
            job = plane.begin_store(write.files, [at[block] for block in write.positions])
            with torch.cuda.stream(stream):
                for layer in range(LAYERS):
                    # Long enough that a layer stored too early is not complete.
                    for _ in range(20):
                        _ = weights @ weights
                    new = torch.randn(2, len(at), TOKENS, HIDDEN, device="cuda:0")
                    layer_of(kv, layer)[:, at] = new.to(torch.bfloat16)
                    plane.start(job, layer, stream.cuda_stream)
                wanted = forward(kv, at, weights, lambda layer: None)
            (report,) = plane.end([job])
            assert report.error is None
            assert catalog.written(write.id, 0, report.checksums)
            catalog.commit(write.id)
            stream.synchronize()
        wanted, stored = wanted.cpu(), kv[:, at].cpu()

    # Another process, perhaps: the pool has other contents, and the blocks are elsewhere.
    kv, pool = pool_of(float("nan"))
    at = list(range(BLOCKS - len(KEYS), BLOCKS))[::-1]
    with ripieno.Catalog(tmp_path / "kv") as catalog:
        namespace = catalog.namespace(ripieno.Namespace())
        with ripieno.Plane(tmp_path / "kv", rank, SHAPE, pool, **options) as plane:
            for _ in range(3 if dram else 1):
                kv.fill_(float("nan"))
                torch.cuda.synchronize()
                reference = catalog.acquire(namespace, KEYS)
                assert len(reference.files) == len(KEYS)
                sums = catalog.checksums(reference.files, 0)
                job = plane.begin_load(reference.files, at, sums)
                with torch.cuda.stream(stream):
                    for layer in range(LAYERS):
                        plane.start(job, layer, stream.cuda_stream)
                    found = forward(
                        kv, at, weights, lambda layer: plane.join(job, layer, stream.cuda_stream)
                    )
                stream.synchronize()
                (report,) = plane.end([job])
                assert report.error is None
                catalog.release(reference.id)
                assert torch.equal(kv[:, at].cpu(), stored)
                # The same operations on the same bits.
                assert torch.equal(found.cpu(), wanted)
            hits = plane.stats()["dram_hit_blocks_total"] if dram else 0
            print(f"{require}: {plane.placement}; {hits} blocks from DRAM")
