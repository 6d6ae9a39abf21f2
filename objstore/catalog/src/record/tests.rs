use proptest::prelude::*;

use super::*;

/// A record that owns the data of a [`Record`].
#[derive(Debug, Clone)]
struct Owned {
    kind: u8,
    numbers: [u32; 4],
    epoch: u64,
    digest: [u8; 32],
    label: String,
    words: Vec<u32>,
}

impl Owned {
    fn record(&self) -> Record<'_> {
        let [a, b, c, _] = self.numbers;
        let (file, namespace) = (FileId(a), NamespaceId(b));
        match self.kind {
            0 => Record::Namespace {
                id: namespace,
                digest: self.digest,
                epoch: self.epoch,
                quota_files: Some(a).filter(|_| c % 2 == 0),
                weight: c,
                label: &self.label,
                owner: Some(b).filter(|_| c % 4 < 2),
            },
            1 => Record::Commit {
                file,
                namespace,
                key: BlockKey(self.digest),
                checksums: self.words.as_slice().into(),
            },
            2 => Record::Evict { first: FileId(a / 2), count: 1 + c / 4 },
            3 => Record::Clear { namespace },
            4 => Record::Epoch { namespace, epoch: self.epoch },
            _ => {
                let kinds = [UseKind::Touched, UseKind::Refreshed, UseKind::Known];
                let how = kinds[c as usize % 3];
                Record::Use { first: FileId(a / 2), count: 1 + c / 4, how }
            }
        }
    }
}

fn owned() -> impl Strategy<Value = Owned> {
    let words = proptest::collection::vec(any::<u32>(), 0..40);
    (0u8..6, any::<[u32; 4]>(), any::<u64>(), any::<[u8; 32]>(), "\\PC{0,16}", words).prop_map(
        |(kind, numbers, epoch, digest, label, words)| Owned {
            kind,
            numbers: numbers.map(|n| n.min(u32::MAX - 1)),
            epoch,
            digest,
            label,
            words,
        },
    )
}

fn encode(records: &[Owned]) -> Vec<u8> {
    let mut bytes = Vec::new();
    records.iter().for_each(|owned| owned.record().encode(&mut bytes));
    bytes
}

proptest! {
    #[test]
    fn what_was_encoded_is_decoded(records in proptest::collection::vec(owned(), 0..20)) {
        // One byte further, so that nothing is aligned.
        let bytes = [&[0], encode(&records).as_slice()].concat();
        let decoded: Result<Vec<_>, _> = Records::new(&bytes[1..]).collect();
        let expected: Vec<_> = records.iter().map(Owned::record).collect();
        prop_assert_eq!(decoded.unwrap(), expected);
    }

    /// A group's CRC excludes such bytes; if they occur nevertheless, nothing panics, and the
    /// records before them are unaffected.
    #[test]
    fn changed_bytes_never_panic(
        records in proptest::collection::vec(owned(), 1..8),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = encode(&records);
        let mut first = bytes.len();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
            first = first.min(at);
        }
        bytes.truncate(cut.index(bytes.len()) + 1);
        let mut end = 0;
        let mut decoded = Records::new(&bytes);
        for owned in &records {
            end += encode(std::slice::from_ref(owned)).len();
            if end > first.min(bytes.len()) {
                break;
            }
            prop_assert_eq!(decoded.next(), Some(Ok(owned.record())));
        }
        for record in decoded.flatten() {
            let mut again = Vec::new();
            record.encode(&mut again);
            prop_assert!(again.len().is_multiple_of(4));
        }
    }

    #[test]
    fn a_run_is_cut_between_records(
        records in proptest::collection::vec(owned(), 1..30), bytes_max in 256usize..1024,
    ) {
        let bytes = encode(&records);
        let mut rest = bytes.as_slice();
        let mut decoded = Vec::new();
        while !rest.is_empty() {
            let taken = Records::fitting(rest, bytes_max);
            prop_assert!(taken > 0 && taken <= bytes_max);
            for record in Records::new(&rest[..taken]) {
                decoded.push(record.unwrap());
            }
            rest = &rest[taken..];
        }
        prop_assert_eq!(decoded, records.iter().map(Owned::record).collect::<Vec<_>>());
    }
}

#[test]
fn impossible_values_are_refused() {
    let body = |kind: u16, words: &[u32]| {
        let mut bytes = Vec::new();
        put(&mut bytes, kind, &[0u32; 0], words.as_bytes());
        Records::new(&bytes).next().unwrap().map(|_| ()).unwrap_err()
    };
    let said = |kind, words: &[u32]| body(kind, words).to_string();
    assert!(said(9, &[]).starts_with("a record of kind 9 is unknown here"));
    assert_eq!(said(EVICT, &[0]), "a record of kind 3 cannot have 1 words");
    for words in [[0, 0], [u32::MAX, 1]] {
        assert_eq!(said(EVICT, &words), "a record of kind 3 has an impossible range of files");
    }
    let mut label = [0u32; 15];
    (label[3], label[14]) = (1, 0x0100_0061);
    assert_eq!(said(NAMESPACE, &label), "a record of kind 1 has an impossible label");
    let cut = Records::new(&[1, 0, 0]).next().unwrap().unwrap_err();
    assert_eq!(cut.to_string(), "3 bytes at the end of a group are no whole record");
}

#[test]
fn the_largest_commit_can_be_written_and_read() {
    let words = vec![7; CHECKSUMS_MAX];
    let commit = Record::Commit {
        file: FileId(1),
        namespace: NamespaceId(2),
        key: BlockKey([3; 32]),
        checksums: words.as_slice().into(),
    };
    let mut bytes = Vec::new();
    commit.encode(&mut bytes);
    assert_eq!(bytes.len(), commit_bytes(CHECKSUMS_MAX));
    assert_eq!(Records::new(&bytes).collect::<Vec<_>>(), [Ok(commit)]);
}

/// The byte map of docs/reference/on-disk-format.md, by hand.
#[test]
fn bytes_are_where_the_document_says() {
    let bytes = |record: Record<'_>| {
        let mut out = Vec::new();
        record.encode(&mut out);
        out
    };
    let (file, namespace) = (FileId(0x0201), NamespaceId(3));
    let key = BlockKey([7; 32]);
    let commit = bytes(Record::Commit { file, namespace, key, checksums: [5, 6][..].into() });
    assert_eq!(commit[..12], [2, 0, 12, 0, 1, 2, 0, 0, 3, 0, 0, 0]);
    assert_eq!((&commit[12..44], &commit[44..]), (&[7; 32][..], &[5, 0, 0, 0, 6, 0, 0, 0][..]));
    let (digest, label) = ([9; 32], "abcde");
    let (id, quota_files, weight) = (namespace, None, 4);
    let of = |owner| {
        bytes(Record::Namespace { id, digest, epoch: 8, quota_files, weight, label, owner })
    };
    let (new, owned) = (of(None), of(Some(1001)));
    assert_eq!((owned[2], &owned[4..68], &owned[68..]), (17, &new[4..], &[0xE9, 3, 0, 0][..]));
    assert_eq!(new[..12], [1, 0, 16, 0, 3, 0, 0, 0, 255, 255, 255, 255]);
    assert_eq!((&new[12..20], &new[20..52]), (&[4, 0, 0, 0, 5, 0, 0, 0][..], &digest[..]));
    assert_eq!((new[52], &new[60..]), (8, b"abcde\0\0\0".as_slice()));
    let evict = bytes(Record::Evict { first: file, count: 4 });
    assert_eq!(evict, [3, 0, 2, 0, 1, 2, 0, 0, 4, 0, 0, 0]);
    assert_eq!(bytes(Record::Clear { namespace }), [4, 0, 1, 0, 3, 0, 0, 0]);
    let epoch = bytes(Record::Epoch { namespace, epoch: 1 });
    assert_eq!(epoch, [5, 0, 3, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    let used = bytes(Record::Use { first: file, count: 4, how: UseKind::Refreshed });
    assert_eq!(used, [6, 0, 3, 0, 1, 2, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0]);
}
