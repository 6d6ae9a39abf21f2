use super::*;

#[test]
fn defaults_follow_the_model() {
    let args = StoreArgs::from_line("").unwrap();
    assert_eq!((args.shape.model, args.shape.object_bytes), ("llama-3-8b", 128 << 10));
    let args = StoreArgs::from_line("--model tiny").unwrap();
    assert_eq!((args.shape.object_bytes, args.coalesce()), (1024, 256 << 10));
    assert_eq!(args.flags.verify, Verify::Sampled);
    let media = MediaChoice::Memory;
    let emu = EmuChoice { count: 2, media, lba_bytes: 512, mdts: 512 << 10 };
    assert_eq!((args.devices, args.gpu), (Devices::Emu(emu), None));
    let args = StoreArgs::from_line("--model deepseek-v3-mla --coalesce off").unwrap();
    assert_eq!((args.shape.block_tokens, args.coalesce()), (64, 72 << 10));
    assert_eq!(StoreArgs::from_line("--coalesce 1MiB").unwrap().coalesce(), 1 << 20);
    for line in ["--json", "-q", "--progress never"] {
        assert!(!StoreArgs::from_line(line).unwrap().shows_progress());
    }
}

#[test]
fn the_gpu_is_chosen_in_full_or_by_default() {
    let gpu = |line| StoreArgs::from_line(line).unwrap().gpu;
    assert_eq!(gpu("--executor inline --require host"), None);
    let default = CudaChoice { ordinal: 0, io_sms: 4, is_resident: false };
    assert_eq!(gpu("--executor cuda"), Some(default));
    let chosen = CudaChoice { ordinal: 2, io_sms: 16, is_resident: true };
    let line = "--executor cuda --gpu 2 --io-sms 16 --launch resident --require staged";
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
        ("--device emu,emu", "named 2 times"),
        ("--requests 0", "1 or more"),
        ("--pool-blocks 0", "1 or more"),
        ("--model tiny --descriptors prp --lba 4096", "cannot pad"),
        ("--executor mpi", "possible values: host, inline, cuda"),
        ("--gpu 0", "no GPU runs"),
        ("--io-sms 2", "no GPU runs"),
        ("--launch resident --executor inline", "no GPU runs"),
        ("--require direct", "host memory"),
        ("--require staged --executor inline", "host memory"),
        ("--executor cuda --io-sms 0", "1 or more"),
        ("--executor cuda --device vfio:65:00.0 --memory peer:00:05.0/2", "--memory peer"),
        ("--device vfio:65:00.0 --devices 2", "--devices"),
        ("--device vfio:65:00.0 --media memory", "--media"),
        ("--device vfio:65:00.0 --lba 512", "--lba"),
        ("--device vfio:65:00.0 --mdts 1MiB", "--mdts"),
        ("--overwrite", "start empty"),
        ("--keep", "cannot be kept"),
        ("--keep --media memory", "cannot be kept"),
        ("--memory moon", "no such place"),
        ("--memory peer:00:05.0/2", "host memory only"),
        ("--device vfio:65:00.0 --memory peer:00:05.0", "names no BAR"),
        ("--device vfio:65:00.0 --memory peer:00:05.0/7", "0 to 5"),
        ("--devices 0", "from 1 to 64"),
        ("--devices 65", "from 1 to 64"),
        ("--lba 520", "512 or 4096"),
        ("--mdts 5000", "a power of two from 8 KiB"),
        ("--mdts 4KiB", "a power of two from 8 KiB"),
        ("--media tape", "no such kind of media"),
        ("--media file:/no/such/place", "No such file"),
        ("--media file:/dev/null", "is not a directory"),
    ] {
        let error = StoreArgs::from_line(line).unwrap_err();
        assert!(error.to_string().contains(wanted), "{line}: {error}");
        let problem = error.downcast_ref::<Problem>();
        assert!(problem.is_none_or(|problem| !problem.hint().is_empty()), "{line}");
    }
}
