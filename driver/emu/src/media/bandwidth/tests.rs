use super::*;
use crate::{DataFault, MemoryMedia, SgList};

const KB: u64 = 1000;
const WRITE: MediaKind = MediaKind::Write { fua: false };

/// Creates a medium with 1 byte per nanosecond for reads, half of that for writes.
fn media(mixed: f64) -> BandwidthMedia {
    let dial = BandwidthDial::default();
    dial.set(Some(Bandwidth { read: 1e9, write: 5e8, latency: Nanos(80), mixed, from: 4096 }));
    BandwidthMedia::new(MemoryMedia::new(1 << 20).unwrap(), dial)
}

fn op(token: u64, kind: MediaKind, offset: u64, len: u64) -> MediaOp {
    let mut sg_list = SgList::new();
    sg_list.push_hole(usize::try_from(len).unwrap());
    MediaOp { token, kind, offset, len, sg_list, placement: 0, fault: DataFault::None }
}

/// Returns the end time of each operation, polled every so many nanoseconds or at each event.
fn run(media: &mut BandwidthMedia, every: Option<u64>) -> Vec<(u64, u64)> {
    let (mut now, mut ended) = (Nanos(0), Vec::new());
    while let Some(event) = media.next_event() {
        now = every.map_or(event, |every| now + Nanos(every));
        let mut done = Vec::new();
        media.poll(now, &mut done);
        ended.extend(done.into_iter().map(|done| (done.token, now.0)));
        assert!(now < Nanos(1 << 20), "it does not end");
    }
    assert_eq!(media.in_flight(), 0);
    ended
}

#[test]
fn bytes_have_their_turns_and_latencies_overlap() {
    let mut media = media(0.4);
    for token in 1..=2 {
        assert!(media.submit(op(token, MediaKind::Read, 8192, 10 * KB), Nanos(0)).is_none());
    }
    assert_eq!(run(&mut media, None), [(1, 10_080), (2, 20_080)]);
}

#[test]
fn mixing_costs_what_it_should_however_seldom_one_looks() {
    for every in [None, Some(1), Some(7)] {
        let mut media = media(0.4);
        assert!(media.submit(op(1, MediaKind::Read, 8192, 10 * KB), Nanos(0)).is_none());
        assert!(media.submit(op(2, WRITE, 8192, 10 * KB), Nanos(0)).is_none());
        // 10 us of reads at a fifth of the speed; 20 us of writes, of which 10 are left by then.
        let late = run(&mut media, every);
        let exact = [(1, 50_080), (2, 60_080)];
        for ((token, at), (wanted, ends)) in late.into_iter().zip(exact) {
            assert_eq!(token, wanted);
            assert!((ends..ends + every.unwrap_or(1)).contains(&at), "{token}: {at}");
        }
    }
}

#[test]
fn what_is_before_the_data_takes_no_time() {
    let mut media = media(0.4);
    assert!(media.submit(op(1, WRITE, 0, 4096), Nanos(0)).is_some());
    assert_eq!(media.next_event(), None);
    media.dial.set(None);
    assert!(media.submit(op(2, WRITE, 8192, 4096), Nanos(0)).is_some());
}
