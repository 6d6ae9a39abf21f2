use super::*;
use crate::devices::{EmuChoice, Media};

#[test]
fn defaults_follow_the_model() {
    let args = StoreArgs::from_line("").unwrap();
    assert_eq!((args.shape.model, args.shape.object_bytes), ("llama-3-8b", 128 << 10));
    let args = StoreArgs::from_line("--model tiny").unwrap();
    assert_eq!((args.shape.object_bytes, args.coalesce()), (1024, 256 << 10));
    assert_eq!(args.flags.verify, Verify::Sampled);
    let emu = EmuChoice { count: 2, media: Media::Memory, lba_bytes: 512, mdts: 512 << 10 };
    assert_eq!((args.devices, args.executor), (Devices::Emu(emu), Executor::Host));
    let args = StoreArgs::from_line("--model deepseek-v3-mla --coalesce off").unwrap();
    assert_eq!((args.shape.block_tokens, args.coalesce()), (64, 72 << 10));
    assert_eq!(StoreArgs::from_line("--coalesce 1MiB").unwrap().coalesce(), 1 << 20);
    for line in ["--json", "-q", "--progress never"] {
        assert!(!StoreArgs::from_line(line).unwrap().shows_progress());
    }
}

#[test]
fn the_gpu_is_chosen_in_full_or_by_default() {
    let gpu = |line| match StoreArgs::from_line(line).unwrap().executor {
        Executor::Cuda(choice) => Some(choice),
        Executor::File | Executor::Host | Executor::Inline => None,
    };
    assert_eq!(gpu("--executor inline --route host"), None);
    let default = CudaChoice { ordinal: 0, sms: 4, is_resident: false };
    assert_eq!(gpu("--executor cuda"), Some(default));
    let chosen = CudaChoice { ordinal: 2, sms: 16, is_resident: true };
    let line = "--executor cuda --gpu 2 --io-sms 16 --launch resident --route staged";
    assert_eq!(gpu(line), Some(chosen));
    assert_eq!(gpu("--executor cuda --launch per-batch"), Some(default));
}

#[test]
fn what_cannot_be_is_refused_with_what_can() {
    for (line, wanted) in [
        ("--model gpt-9", "llama-3-8b"),
        ("--block-tokens 48", "cannot be cut"),
        ("--model tiny --block-tokens 1", "not a multiple of 4"),
        ("--queues 0", "from 1 to 64"),
        ("--queues 65", "from 1 to 64"),
        ("--depth 100", "power of two"),
        ("--depth 2048", "2 to 1024"),
        ("--coalesce lots", "number and a unit"),
        ("--coalesce 0", "at least one object"),
        ("--model tiny --coalesce 1", "one object has 1 KiB"),
        ("--model tiny --dram 1KiB", "a block of model tiny has 4 KiB"),
        ("--devices emu", "give a number of files"),
        ("--requests 0", "1 or more"),
        ("--pool-blocks 0", "1 or more"),
        ("--model tiny --descriptors prp --lba 4096", "cannot pad"),
        ("--executor mpi", "host, inline, cuda"),
        ("--gpu 0", "no GPU runs"),
        ("--io-sms 2", "no GPU runs"),
        ("--launch resident --executor inline", "no GPU runs"),
        ("--route direct", "to this pool there is host"),
        ("--route staged --executor inline", "to this pool there is host"),
        ("--executor cuda --io-sms 0", "from 1 to"),
        ("--executor cuda --devices vfio:65:00.0 --memory peer:00:05.0/2", "--memory peer"),
        ("--devices vfio:65:00.0 --path x", "a directory or drives"),
        ("--devices vfio:65:00.0 --lba 512", "lba: drives have"),
        ("--devices vfio:65:00.0 --mdts 1MiB", "--mdts"),
        ("--overwrite store", "start empty"),
        ("--keep", "cannot be kept"),
        ("--memory moon", "no such place"),
        ("--memory peer:00:05.0/2", "host memory only"),
        ("--devices vfio:65:00.0 --memory peer:00:05.0", "names no BAR"),
        ("--devices vfio:65:00.0 --memory peer:00:05.0/7", "0 to 5"),
        ("--devices 0", "1 to 64"),
        ("--devices 65", "1 to 64"),
        ("--lba 520", "512 or 4096"),
        ("--mdts 5000", "a power of two from 8 KiB"),
        ("--mdts 4KiB", "a power of two from 8 KiB"),
        ("--dram-mode read-ahead", "give dram, too"),
    ] {
        let error = StoreArgs::from_line(line).unwrap_err();
        assert!(error.to_string().contains(wanted), "{line}: {error}");
        let problem = error.downcast_ref::<Problem>();
        let advises =
            |problem: &Problem| !problem.hint().is_empty() || problem.to_string().contains(';');
        assert!(problem.is_none_or(advises), "{line}");
    }
}
