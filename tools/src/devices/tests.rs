use super::*;

fn named(values: &[&str]) -> Result<Vec<PciAddress>, Problem> {
    drives(&values.iter().map(|value| (*value).to_owned()).collect::<Vec<_>>())
}

#[test]
fn drives_are_named_in_lists_and_again() {
    let two = ["0000:65:00.0", "0000:66:00.0"].map(|text| text.parse().unwrap());
    for values in [
        &["vfio:0000:65:00.0,vfio:0000:66:00.0"][..],
        &["vfio:0000:65:00.0,0000:66:00.0"],
        &["vfio:65:00.0", "vfio:66:00.0"],
    ] {
        assert_eq!(named(values).unwrap(), two, "{values:?}");
    }
    assert_eq!(Devices::Vfio(two[..1].to_vec()).to_string(), "vfio:0000:65:00.0");
    assert_eq!(memory("peer:0000:00:05.0/2").unwrap().to_string(), "peer:0000:00:05.0/2");
    assert_eq!(named(&["emu"]).unwrap(), []);
}

#[test]
fn what_is_no_device_is_refused_with_a_hint() {
    for (value, wanted) in [
        ("tape", "no such kind of device"),
        ("vfio:", "--device vfio:"),
        ("vfio:65", "--device vfio:65"),
        ("0000:65:00.0", "no such kind of device"),
        ("vfio:65:00.0,vfio:0000:65:00.0", "named twice"),
        ("emu,vfio:65:00.0", "cannot share a store"),
        ("emu,emu", "emu is named 2 times"),
    ] {
        let problem = named(&[value]).unwrap_err();
        assert!(problem.to_string().contains(wanted), "{value}: {problem}");
        assert!(!problem.hint().is_empty(), "{value}");
    }
}
