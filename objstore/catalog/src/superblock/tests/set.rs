//! Sets of devices that make up a store.

use super::*;

fn members(count: u8) -> Vec<Member> {
    let (media, _) = formatted(count);
    let member = |(number, medium): (usize, &Medium)| {
        let (identity, region) = device(number as u8, 512, 8 << 11);
        let found = read(medium).unwrap();
        Member { name: medium.name().to_owned(), identity, region, found }
    };
    media.iter().enumerate().map(member).collect()
}

fn change(member: &mut Member, change: impl FnOnce(&mut Superblock)) {
    let OnDevice::Ours(superblock) = &mut member.found else { panic!("it is ours") };
    change(superblock);
}

fn refused(members: &[Member], expected: &Expected) -> String {
    check_set(members, expected).unwrap_err().to_string()
}

fn check(members: &[Member]) -> String {
    refused(members, &Expected::default())
}

#[test]
fn a_set_that_was_formatted_together_is_accepted() {
    let members = members(3);
    let expected =
        Expected { store: Some(StoreId([7; 16])), rank: 0, shape: Some(SHAPE), codec: None };
    let superblocks = check_set(&members, &expected).unwrap();
    assert_eq!(superblocks.len(), 3);
    // A device may have grown.
    let mut larger = members;
    larger[1].identity.namespace_lbas += 1;
    larger[1].region.lbas += 1;
    assert_eq!(check_set(&larger, &expected), Ok(superblocks));
}

#[test]
fn what_is_no_store_is_named() {
    let mut members = members(2);
    members[1].found = OnDevice::Blank;
    assert!(check(&members).starts_with("sim1: there is no store on it"));
    members[1].found = OnDevice::Foreign("an XFS filesystem");
    assert!(check(&members).starts_with("sim1: it holds an XFS filesystem and no store"));
    // The device on which formatting went further has priority over the one it did not reach.
    change(&mut members[0], |superblock| superblock.state = State::Formatting);
    assert!(check(&members).starts_with("sim0: formatting was interrupted"));
    assert_eq!(check(&[]), "a rank has 1 to 76 devices, and 0 were given");
}

#[test]
fn devices_of_another_store_or_rank_are_named() {
    let mut other = members(2);
    change(&mut other[1], |superblock| superblock.store = StoreId([8; 16]));
    let text = check(&other);
    assert!(text.starts_with(&format!("sim1: it belongs to store {}", "08".repeat(16))), "{text}");
    assert!(text.ends_with("(sim0)"), "{text}");
    let wanted = Expected { store: Some(StoreId([8; 16])), ..Expected::default() };
    let text = refused(&other, &wanted);
    assert!(text.starts_with(&format!("sim0: it belongs to store {}", "07".repeat(16))), "{text}");
    assert!(text.ends_with("(the configuration)"), "{text}");
    let text = refused(&members(2), &Expected { rank: 3, ..Expected::default() });
    assert_eq!(text, "sim0: it belongs to rank 0 of 1, and rank 3 was asked for");
}

#[test]
fn missing_swapped_and_doubled_devices_are_named() {
    let all = members(3);
    let [a, b, c] = [&all[0], &all[1], &all[2]].map(Clone::clone);
    let text = check(&[a.clone(), c.clone()]);
    assert!(text.starts_with("device 1 of the 3 of rank 0 is missing: model, serial number S1"));
    let text = check(&[b.clone(), a.clone(), c.clone()]);
    assert_eq!(
        text,
        "sim1: it is device 1 of the store and was given as device 0; the order is sim0, sim1, sim2"
    );
    let twice = Member { name: "again".into(), ..a.clone() };
    let text = check(&[a, twice, c, b]);
    assert!(text.starts_with("sim0 and again both say that they are device 0"), "{text}");
}

#[test]
fn devices_that_changed_are_named() {
    let member = members(2);
    let changed = |change: &dyn Fn(&mut Member)| {
        let mut members = member.clone();
        change(&mut members[1]);
        check(&members)
    };
    let text = changed(&|member| member.identity.serial[0] = b'X');
    assert!(text.starts_with("sim1: its superblock was written on another device"), "{text}");
    assert!(text.contains("serial number S1") && text.contains("serial number X1"), "{text}");
    let text = changed(&|member| {
        (member.identity.lba_bytes, member.region.lba_shift) = (4096, 12);
    });
    assert!(text.contains("LBAs of 512 bytes and has LBAs of 4096 now"), "{text}");
    let text = changed(&|member| member.identity.namespace_lbas -= 1);
    assert!(text.starts_with("sim1: its namespace had 16384 LBAs"), "{text}");
    let text = changed(&|member| member.region.lbas -= 1);
    assert!(text.starts_with("sim1: the store's region had 16384 LBAs"), "{text}");
    let text = changed(&|member| member.region.first.0 = 8);
    assert!(text.starts_with("sim1: the store's region begins at LBA 0, and LBA 8"), "{text}");
    let text = changed(&|member| {
        super::set::change(member, |superblock| superblock.layout.files -= 1);
    });
    assert!(text.starts_with("sim1 and sim0 do not agree"), "{text}");
}

/// The namespace's own identifiers have priority over its controller's names.
#[test]
fn a_namespace_is_known_by_its_identifiers() {
    let (mut a, mut b) = (device(0, 512, 1).0, device(1, 512, 1).0);
    assert!(!a.is_same(&b) && a.is_same(&a));
    (a.eui64, b.eui64) = ([1; 8], [1; 8]);
    assert!(a.is_same(&b));
    (a.nguid, b.nguid) = ([1; 16], [2; 16]);
    assert!(!a.is_same(&b));
    b.nguid = [0; 16];
    assert!(a.is_same(&b));
}

#[test]
fn another_model_is_refused_with_both_shapes() {
    let members = members(1);
    let shape =
        |shape: KvShape| refused(&members, &Expected { shape: Some(shape), ..Expected::default() });
    let text = shape(KvShape { layers: 3, ..SHAPE });
    let formatted = "2 layers x 2 segments, objects of 4096 bytes, 16 tokens a block";
    assert!(text.contains(formatted) && text.contains(": 3 layers x 2"), "{text}");
    let text = shape(KvShape { block_tokens: 32, ..SHAPE });
    assert!(text.contains(formatted) && text.contains("32 tokens a block; give"), "{text}");
}

#[test]
fn another_codec_is_refused_in_words() {
    let members = members(1);
    let asked = |codec| Expected { codec, ..Expected::default() };
    assert!(check_set(&members, &asked(Some(Codec::None))).is_ok());
    let text = refused(&members, &asked(Some(Codec::Exp3)));
    assert!(text.contains("made with codec none, and codec exp3 was asked for; leave"), "{text}");
}
