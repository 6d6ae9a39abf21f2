use super::*;

#[test]
fn flags_are_consistent() {
    command().debug_assert();
}

#[test]
fn what_chooses_logs_is_checked() {
    for good in ["debug", "warn,nvme_driver=debug", "ripieno::replay=debug", "objstore", "off"] {
        assert!(targets(good).is_ok(), "{good}");
    }
    for bad in ["garbage", "debug,garbage=warn", "ripieno=loud", "=", "objstore=debug=warn"] {
        assert!(targets(bad).is_err(), "{bad}");
    }
}

#[test]
fn a_hint_of_a_shortage_names_flags_that_the_command_has() {
    let error = |code| anyhow::Error::from(io::Error::from_raw_os_error(code));
    for (names, code, wanted) in [
        (&["replay"][..], libc::ENOMEM, "(ulimit -v), or a smaller --capacity, or a smaller"),
        (&["replay"], libc::EMFILE, "(ulimit -n), or a smaller --devices"),
        (&["scrub"], libc::EMFILE, "(ulimit -n)"),
        (&["sim", "plan"], libc::ENOMEM, "(ulimit -v)"),
    ] {
        let path = Path(names.iter().map(|name| (*name).to_owned()).collect());
        let hint = shortage(&error(code), &|flag| path.has(flag)).unwrap();
        assert!(hint.contains(wanted) && hint.contains("--") == wanted.contains("--"), "{hint}");
    }
}

#[test]
fn a_line_of_fio_is_answered_at_once() {
    let words = "bench raw --name=x --filename=/tmp/f --rw=randread --bs=4k --direct=1 --iodepth=8";
    let words = || words.split(' ').map(str::to_owned);
    let path = Path::unread(words());
    let tips: Vec<String> = words().filter_map(|word| fio_tip(&word, &path)).collect();
    assert_eq!(tips.len(), 3, "{tips:?}");
    assert!(tips[1].starts_with("--filename: it is --path DIR"), "{tips:?}");
}

#[test]
fn a_former_flag_leads_to_the_present_one_of_the_command() {
    for (line, now) in [
        ("replay --media file:/tmp", Some("--path")),
        ("bench raw --device vfio:65:00.0", Some("--devices")),
        ("doctor --require direct", Some("--route")),
        ("inspect --device=vfio:65:00.0", Some("--devices")),
        ("bench raw --device /dev/nvme0n1", Some("--block /dev/nvme0n1")),
        ("bench raw --devices /dev/nvme0n1", Some("--block /dev/nvme0n1")),
        ("bench raw --devices file:/tmp", Some("--path /tmp")),
        ("replay --executor gpu", Some("--executor cuda")),
        ("replay --executor gpus", None),
        ("bench raw --filename=/dev/nvme0n1", Some("--block")),
        ("bench raw --filename=/var/tmp/file", Some("it is --path /var/tmp here")),
        ("bench raw --rwmixwrite=30", Some("--rwmixread")),
        ("bench raw --offset=1m", Some("--size")),
        ("bench raw --numjobs 4", Some("--queues")),
        ("bench raw --direct=1", Some("leave it out")),
        ("bench raw --ioengine libaio", Some("--executor")),
        ("bench raw /dev/nvme0n1", Some("--block /dev/nvme0n1")),
        ("bench raw /var/tmp", Some("--path /var/tmp")),
        ("inspect ./store", Some("--path ./store")),
        ("inspect src", Some("--path src")),
        ("identify /dev/nvme0n1", Some("--devices ng:/dev/ng0n1")),
        ("identify /dev/ng1n1", Some("--devices ng:/dev/ng1n1")),
        ("bench raw /dev/ng1n1", Some("--devices ng:/dev/ng1n1")),
        ("identify 65:00.0", Some("--devices vfio:65:00.0")),
        // They have no such flag, and never had one.
        ("replay --numjobs 4", None),
        ("sim --media file:/tmp", None),
        ("replay --schedule slack", Some("it is a flag of ripieno pace")),
        ("pace --path /tmp", Some("it is a flag of ripieno replay")),
        ("-v serve", Some("-v comes after the name of the command")),
        ("--json sim", None),
        ("bench raw --output=x.json", Some("> FILE")),
        ("bench raw --rate=10m", Some("as many as fit in --iodepth")),
        ("bench raw --thread", Some("leave it out")),
        ("bench raw --bsrange=4k-64k", Some("--bs")),
        ("bench raw job.fio", Some("job files")),
        ("bench --rw=randread", Some("ripieno bench raw")),
        ("raw", Some("ripieno bench raw")),
        ("plan", Some("ripieno sim plan")),
        ("list", Some("nvme-bind list")),
        ("id-ctrl", Some("ripieno identify")),
        ("fio --rw=randread", Some("ripieno bench raw")),
        ("serve my.toml", Some("--config my.toml")),
        ("nothing-like-it", None),
    ] {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let error = command().try_get_matches_from(["ripieno".to_owned()].iter().chain(&words));
        let hint = tip(&error.unwrap_err(), &Path::unread(words.into_iter()));
        assert_eq!(hint.is_some(), now.is_some(), "{line}: {hint:?}");
        assert!(hint.unwrap_or_default().contains(now.unwrap_or_default()), "{line}");
    }
}
