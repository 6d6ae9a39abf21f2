use super::*;

fn os(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.raw_os_error())
}

fn address() -> PciAddress {
    PciAddress { domain: 0, bus: 0x65, device: 0, function: 0 }
}

#[test]
fn every_message_says_what_was_asked_what_was_found_and_what_to_do() {
    let cases = [
        (Call::OpenContainer, Errno::NOENT, "modprobe"),
        (Call::OpenGroup, Errno::NOENT, "nvme-bind"),
        (Call::OpenGroup, Errno::ACCESS, "chown"),
        (Call::SetIommu, Errno::PERM, "interrupt remapping"),
        (Call::SetContainer, Errno::INVAL, "before mapping memory"),
        (Call::SetIommu, Errno::NODEV, "modprobe"),
        (Call::DeviceFd, Errno::NODEV, "vfio-pci"),
        (Call::SetIrqs, Errno::NOSPC, "fewer"),
        (Call::Config, Errno::IO, "dmesg"),
    ];
    for (call, errno, to_do) in cases {
        let text = VfioError::os(address(), call, os(errno)).to_string();
        assert!(text.starts_with("0000:65:00.0: "), "{text}");
        assert!(text.contains(&call.to_string()), "{text}");
        assert!(text.contains(&os(errno).to_string()), "{text}");
        assert!(text.contains(to_do), "{text}");
    }
}

#[test]
fn who_is_in_the_way() {
    let blockers =
        vec!["0000:64:00.0 (nvme)".to_owned(), "0000:64:00.1 (snd_hda_intel)".to_owned()];
    let text = VfioError::NotViable { address: address(), group: 7, blockers }.to_string();
    assert!(text.contains("0000:64:00.0 (nvme), 0000:64:00.1 (snd_hda_intel)"), "{text}");
    let holders = vec!["qemu (pid 42)".to_owned()];
    let text = VfioError::Busy { address: address(), group: 7, holders }.to_string();
    assert!(text.contains("qemu (pid 42)"), "{text}");
    let text = VfioError::Busy { address: address(), group: 7, holders: vec![] }.to_string();
    assert!(text.contains("as root"), "{text}");
    let driver = Some("nvme".into());
    let text = VfioError::NotBound { address: address(), driver }.to_string();
    assert!(text.contains("driver nvme has it and not vfio-pci"), "{text}");
}

#[test]
fn lock_limits_are_explained_with_numbers() {
    let text = map_hint(&os(Errno::NOMEM), Some(65_536), 8192);
    assert!(text.contains("65536") && text.contains("8192") && text.contains("ulimit -l"));
    assert!(map_hint(&os(Errno::NOMEM), None, 0).contains("no memory left"));
    assert!(map_hint(&os(Errno::NOSPC), None, 0).contains("dma_entry_limit"));
    assert!(map_hint(&os(Errno::FAULT), None, 0).contains("BAR"));
    assert!(map_hint(&io::Error::other("odd"), None, 0).contains("dmesg"));
}
