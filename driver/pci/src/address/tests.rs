use proptest::prelude::*;

use super::*;

#[test]
fn long_and_short() {
    let address = PciAddress { domain: 0, bus: 0x65, device: 0, function: 0 };
    assert_eq!("0000:65:00.0".parse(), Ok(address));
    assert_eq!("65:00.0".parse(), Ok(address));
    assert_eq!(address.to_string(), "0000:65:00.0");
    let vmd: PciAddress = "10000:e1:00.0".parse().unwrap();
    assert_eq!((vmd.domain, vmd.bus, vmd.to_string().as_str()), (0x1_0000, 0xE1, "10000:e1:00.0"));
}

#[test]
fn nonsense() {
    for text in [
        "",
        ".",
        ":",
        "65",
        "65:00",
        "65.0",
        "65:00.8",
        "65:20.0",
        "165:00.0",
        "65:00.00",
        "g5:00.0",
        "+5:00.0",
        " 65:00.0",
        "0:0:65:00.0",
        "123456789:65:00.0",
        "65:00.",
        ":00.0",
        "65:.0",
        "0000:65:00.0\n",
        "ü:00.0",
    ] {
        let error = text.parse::<PciAddress>().unwrap_err();
        assert!(error.to_string().contains("lspci -D"), "{text:?}");
    }
}

proptest! {
    #[test]
    fn what_is_written_can_be_read(
        domain: u32, bus: u8, device in 0..32u8, function in 0..8u8
    ) {
        let address = PciAddress { domain, bus, device, function };
        prop_assert_eq!(address.to_string().parse(), Ok(address));
    }

    #[test]
    fn no_text_panics(text in "[0-9a-f:. ]{0,16}") {
        if let Ok(address) = text.parse::<PciAddress>() {
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }
    }
}
