use super::*;

#[test]
fn every_kind_decodes() {
    assert_eq!(IoStatus::decode(abi::STATUS_OK), IoStatus::Ok);
    let read_error = IoStatus::decode(abi::STATUS_NVME | 0x4281);
    assert_eq!(read_error, IoStatus::Nvme(Status(0x4281)));
    assert_eq!(
        read_error.to_string(),
        "the controller reported 02/81h Unrecovered Read Error (do not retry)"
    );
    assert_eq!(IoStatus::decode(abi::STATUS_TIMEOUT), IoStatus::Timeout);
    assert_eq!(IoStatus::decode(abi::STATUS_CANCELLED), IoStatus::Cancelled);
    assert_eq!(IoStatus::decode(abi::STATUS_FAULT), IoStatus::Fault);
    assert_eq!(IoStatus::decode(abi::STATUS_INVALID), IoStatus::Invalid);
    assert_eq!(IoStatus::decode(abi::STATUS_CHECKSUM), IoStatus::Checksum);
}

#[test]
fn what_is_not_known_is_never_taken_for_success() {
    for word in [1, 0x7fff, abi::STATUS_NVME, abi::STATUS_NVME | 0x8000, 0xdead_beef] {
        assert_eq!(IoStatus::decode(word), IoStatus::Unknown(word), "{word:#x}");
        assert!(!IoStatus::decode(word).is_ok());
    }
}

#[test]
fn only_what_never_reached_or_left_the_device_is_safe() {
    assert!(IoStatus::Timeout.may_still_transfer());
    assert!(IoStatus::Fault.may_still_transfer());
    for safe in [IoStatus::Ok, IoStatus::Cancelled, IoStatus::Invalid, IoStatus::Checksum] {
        assert!(!safe.may_still_transfer());
    }
}
