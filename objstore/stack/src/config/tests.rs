use std::path::Path;

use super::*;

fn parsed(json: &str) -> Result<StackConfig, String> {
    serde_json::from_str(json).map_err(|error| error.to_string())
}

fn refused(name: &str, text: &str) -> String {
    StackConfig::default().set(name, text).unwrap_err()
}

#[test]
fn every_kind_of_value_is_read() {
    let config = parsed(
        r#"{"path": "~/kv", "devices": 2, "capacity": "100GiB", "lba": 512, "codec": "exp3",
            "overwrite": "store", "executor": "cuda", "gpu": 1, "io_sms": 8, "route": "direct",
            "queues": 4, "depth": 64, "dram": 1048576, "dram_mode": "read-ahead", "pacing": true,
            "metrics": "9400"}"#,
    );
    let expected = StackConfig {
        path: Some("~/kv".into()),
        devices: Some(DeviceChoice::Files(2)),
        capacity: Some(100 << 30),
        lba: Some(512),
        codec: Some(Codec::Exp3),
        overwrite: Some(Overwrite::Store),
        executor: Some(Executor::Cuda(CudaChoice::new(0))),
        gpu: Some(1),
        io_sms: Some(8),
        route: Some(Route::Direct),
        queues: Some(4),
        depth: Some(64),
        dram: Some(1 << 20),
        dram_mode: Some(DramMode::ReadAhead),
        pacing: Some(true),
        metrics: Some("9400".parse().unwrap()),
    };
    assert_eq!(config.unwrap(), expected);
    let drives = parsed(r#"{"devices": ["vfio:0000:65:00.0", "66:00.0"], "path": null}"#).unwrap();
    let addresses = ["65:00.0", "66:00.0"].map(|address| address.parse().unwrap());
    let devices = Some(DeviceChoice::Drives(addresses.into()));
    assert_eq!(drives, StackConfig { devices, ..StackConfig::default() });
    assert_eq!(drives.executor(&PoolMemory::Own { blocks: 1 }), Executor::Host);
    let kept = parsed(r#"{"devices": "ng:/dev/ng0n1,/dev/ng1n1"}"#).unwrap();
    let names: Vec<String> = kept.drives().iter().map(ToString::to_string).collect();
    assert_eq!(names, ["ng:/dev/ng0n1", "ng:/dev/ng1n1"]);
    assert_eq!(kept.executor(&PoolMemory::Own { blocks: 1 }), Executor::File);
}

#[test]
fn a_wrong_value_is_named_with_what_can_be_given() {
    for (name, text, why) in [
        ("path", " ", "the name of a directory"),
        ("devices", "0", "1 to 64, or drives: ng:"),
        ("devices", "65", "1 to 64, or drives: ng:"),
        ("devices", "/dev/nvme0n1", "or drives: ng:"),
        ("devices", "", "or drives: ng:"),
        ("devices", "vfio:nvme0", "or drives: ng:"),
        ("devices", "vfio:65:00.0,0000:65:00.0", "named twice"),
        ("devices", "ng:/dev/ng0n1,ng:/dev/ng0n1", "named twice"),
        ("devices", "ng:ng0n1", "no path from / on"),
        ("devices", "/dev/ng0n1", "or drives: ng:"),
        ("devices", "vfio:65:00.0,ng:/dev/ng0n1", "or drives: ng:"),
        ("devices", "ng:/dev/ng0n1,vfio:65:00.0", "no path from / on"),
        ("capacity", "many", "a number and a unit"),
        ("capacity", "3.5", "a number and a unit"),
        ("lba", "520", "give 512 or 4096"),
        ("overwrite", "all", "give nothing, store or anything"),
        ("executor", "gpu", "give file, host, inline or cuda"),
        ("gpu", "-1", "a whole number from 0 to"),
        ("io_sms", "0", "a whole number from 1 to"),
        ("io_sms", "18446744073709551616", "a whole number from 1 to"),
        ("route", "fast", "give direct, staged or host"),
        ("queues", "65", "a whole number from 1 to 64"),
        ("depth", "100", "a power of two from 2 to 1024"),
        ("dram", "-1", "a number and a unit"),
        ("dram_mode", "back", "give write-through or read-ahead"),
        ("pacing", "1", "give true or false"),
        ("metrics", "nonsense", "a port (9400)"),
    ] {
        let error = refused(name, text);
        let start = format!("{name}: {text:?} was given; ");
        assert!(error.starts_with(&start) && error.contains(why), "{error}");
    }
    assert!(parsed(r#"{"path": {}}"#).unwrap_err().contains("expected text, a number"));
}

#[test]
fn an_unknown_name_leads_to_the_right_one() {
    for (name, why) in [
        ("home", "its name is path"),
        ("dram_bytes", "its name is dram"),
        ("drma", "dram is the nearest"),
        ("device", "its name is devices"),
        ("device_s", "devices is the nearest"),
        ("xyz", "there are path, devices,"),
    ] {
        let error = refused(name, "1");
        assert!(error.starts_with(&format!("{name}: there is no such option;")), "{error}");
        assert!(error.contains(why), "{error}");
    }
    let beside = ["engines".to_owned()];
    assert!(unknown_option("engine", &beside).ends_with("engines is the nearest"));
    assert!(FORMER.iter().all(|(_, now)| OPTIONS.iter().any(|option| option.name == *now)));
}

#[test]
fn defaults_are_those_of_the_store() {
    let (options, mut config) = (StoreOptions::default(), StackConfig::default());
    let own = |config: &StackConfig| {
        let (executor, controller) = (Executor::Host, ControllerOptions::default());
        let (tuned, _) = config.tune(executor, options.clone(), controller);
        let StoreOptions { queues, depth, dram, dram_mode, .. } = tuned;
        (queues, depth, dram, dram_mode)
    };
    let before = own(&config);
    for name in ["depth", "dram", "dram_mode"] {
        let option = OPTIONS.iter().find(|option| option.name == name).unwrap();
        config.set(name, option.default).unwrap();
    }
    config.set("queues", "1").unwrap();
    assert_eq!(own(&config), before);
    assert_eq!(StackConfig::at("kv").path.as_deref(), Some(Path::new("kv")));
}

#[test]
fn options_of_a_gpu_need_one() {
    let pool = PoolMemory::Own { blocks: 1 };
    let executor = |json: &str| parsed(json).unwrap().check(&pool);
    assert_eq!(executor("{}").unwrap(), Executor::Host);
    let CudaChoice { ordinal, sms, .. } = CudaChoice::new(1);
    let Ok(Executor::Cuda(choice)) = executor(r#"{"executor": "cuda", "gpu": 1}"#) else {
        panic!()
    };
    assert_eq!((choice.ordinal, choice.sms), (ordinal, sms));
    for name in ["gpu", "io_sms"] {
        let error = executor(&format!(r#"{{"{name}": 2}}"#)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{name}: no GPU runs the I/O kernel")), "{error}");
    }
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let pool = PoolMemory::Own { blocks: 1 };
    for (json, why) in [
        (r#"{"path": "kv", "devices": "vfio:65:00.0"}"#, "devices: a store has a directory or"),
        (r#"{"devices": "vfio:65:00.0", "lba": 512}"#, "lba: drives have"),
        (r#"{"dram_mode": "read-ahead"}"#, "dram_mode: it is for dram"),
        (r#"{"codec": "exp3", "executor": "cuda"}"#, "codec: the CPU encodes, and a GPU"),
        (r#"{"gpu": 0}"#, "gpu: no GPU runs"),
        (r#"{"route": "direct"}"#, "route: direct was asked for"),
    ] {
        let error = parsed(json).unwrap().check(&pool).unwrap_err().to_string();
        assert!(error.starts_with(why), "{json}: {error}");
    }
    let drives = parsed(r#"{"devices": "vfio:65:00.0", "overwrite": "store"}"#).unwrap();
    assert_eq!(drives.check(&pool).unwrap(), Executor::Host);
    assert!(drives.dir().unwrap_err().to_string().starts_with("path: it is missing"));
}
