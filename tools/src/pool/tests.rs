use cuda_mock::{Level, isolated};
use nvme_driver::DmaSpace as _;
use nvme_emu::EmuDomain;
use objstore::KvPool;
use ripieno_stack::{CudaChoice, Gpu};

use super::*;
use crate::model::MODELS;

fn pool(blocks: u32) -> Pool {
    let shape = Shape::new(&MODELS[0], 64).unwrap();
    let bytes = shape.block_bytes() as usize * blocks as usize;
    let memory = EmuDomain::new("test").alloc(bytes).unwrap();
    let registered = KvPool::contiguous(memory, &shape, blocks).unwrap();
    let access = CpuAccess::new(&registered, bytes).unwrap();
    Pool::new(Box::new(access), shape, blocks, 3)
}

#[test]
fn blocks_are_handed_out_scattered_and_all_of_them() {
    let mut pool = pool(64);
    let first = pool.take(64);
    let mut sorted = first.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..64).map(BlockId).collect::<Vec<_>>());
    let neighbours = first.windows(2).filter(|pair| pair[1].0 == pair[0].0 + 1).count();
    assert!(neighbours < 8, "{neighbours} of 63 neighbours");
    let (some, others) = (pool.take(40), pool.take(24));
    assert!(others.iter().all(|block| !some.contains(block)));
    assert_eq!(pool.take(0), []);
}

/// Writes all objects, corrupts a part of one, and detects exactly that.
fn objects_do_not_overlap(mut pool: Pool) {
    let key = |block: u32| BlockKey([block as u8; 32]);
    let places = || (0..5).flat_map(|block| [(0, 0), (0, 1), (1, 0), (1, 1)].map(|at| (block, at)));
    let items = |pool: &Pool| -> Vec<Item> {
        places().map(|(block, at)| pool.item(BlockId(block), key(block), at, (0, 128))).collect()
    };
    let all = items(&pool);
    pool.access().make(&all, &mut || ()).unwrap();
    let part = pool.item(BlockId(2), key(2), (1, 0), (64, 64));
    pool.access().poison(&[part], &mut || ()).unwrap();
    let found = pool.access().check(all).unwrap()(&mut || ()).unwrap();
    let wrong: Vec<_> = places().enumerate().filter(|(_, at)| *at == (2, (1, 0))).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].0, found[0].1.offset), (wrong[0].0, 64));
    assert_eq!(found[0].1.found, 0xDEAD_BEEF);
}

#[test]
fn objects_do_not_overlap_for_the_cpu() {
    objects_do_not_overlap(pool(5));
}

#[test]
fn objects_do_not_overlap_for_a_gpu() {
    let test = "pool::tests::objects_do_not_overlap_for_a_gpu";
    isolated(test, Level::Full, &[], || {
        let gpu = Gpu::open(CudaChoice { ordinal: 0, sms: 4, is_resident: false }).unwrap();
        let shape = Shape::new(&MODELS[0], 64).unwrap();
        let bytes = shape.block_bytes() * 5;
        let domain = EmuDomain::with_copies("test", gpu.for_store().copies);
        let memory = gpu.device().allocate(64 << 10).unwrap().into_external();
        let memory = domain.import(memory).unwrap();
        let registered = KvPool::contiguous(memory, &shape, 5).unwrap();
        let access = GpuAccess::new(&gpu, &registered, bytes, 64).unwrap();
        objects_do_not_overlap(Pool::new(Box::new(access), shape, 5, 3));
    });
}

#[test]
fn transfers_are_polled_meanwhile() {
    let mut pool = pool(5000);
    let item = |block| pool.item(BlockId(block), BlockKey([1; 32]), (0, 0), (0, 128));
    let items: Vec<Item> = (0..5000).map(item).collect();
    let mut polls = 0;
    pool.access().make(&items, &mut || polls += 1).unwrap();
    assert_eq!(polls, 5000 * 128 / (256 << 10));
}

#[test]
#[should_panic(expected = "block 5 of a pool of 5")]
fn there_is_nothing_behind_the_last_block() {
    pool(5).item(BlockId(5), BlockKey([1; 32]), (0, 0), (0, 128));
}

#[test]
#[should_panic(expected = "of an object of 128")]
fn there_is_nothing_behind_an_object() {
    pool(5).item(BlockId(0), BlockKey([1; 32]), (0, 0), (64, 72));
}

#[test]
#[should_panic(expected = "of a pool of")]
fn there_is_nothing_behind_the_pool() {
    let mut pool = pool(5);
    let item = pool.item(BlockId(4), BlockKey([1; 32]), (1, 1), (0, 128));
    let beyond = Item { at: item.at + 4, ..item };
    pool.access().poison(&[beyond], &mut || ()).unwrap();
}
