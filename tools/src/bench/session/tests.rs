use nvme_spec::ids::{Lba, Nsid};

use super::*;

/// Stores eight blocks, retrieves them in another order, then does `harm`, and returns the problems
/// that the checks find.
fn checked(line: &str, harm: impl Fn(&mut Session<'_>, &[Item])) -> Vec<String> {
    let args = StoreArgs::from_line(&format!("--model tiny --pool-blocks 8 {line}")).unwrap();
    let done = with(&args, 8, None, &mut Interrupt::never(), "", |session| {
        let (keys, mut blocks) = (&session.keys[..8], session.pool.take(8));
        session.fill(keys, &blocks)?;
        session.save(keys, &blocks)?;
        session.store.sync_journal()?;
        let before = session.counted()?;
        blocks.reverse();
        let sample = session.sample(keys, &blocks)?;
        let load = session.store.retrieve(&session.store.lookup(keys)?, &blocks)?;
        let moved =
            session.passes(2, |store, layer| store.start(&load, layer, Order::Unordered))?.unwrap();
        assert_eq!((moved.seconds.len(), &moved.wrong[..]), (2, &[][..]));
        harm(session, &sample);
        let mut wrong = session.problems(&before)?;
        wrong.extend(session.compare(sample)?);
        Ok(wrong)
    });
    done.unwrap().value
}

#[test]
fn passes_without_faults_pass_their_checks() {
    for line in ["", "--devices 3 --queues 2", "--executor inline", "--lba 4096", "--coalesce off"]
    {
        assert_eq!(checked(line, |_, _| {}), [""; 0], "{line}");
    }
}

#[test]
fn wrong_contents_and_counts_are_noticed() {
    let wrong = checked("", |session, sample| {
        session.pool.access().poison(&sample[..1], &mut || {}).unwrap();
    });
    assert!(wrong.len() == 1 && wrong[0].contains("not what was stored"), "{wrong:?}");
    let wrong = checked("", |session, _| {
        session.devices[0].lock().read(Nsid(1), Lba(0), &mut [0; 4096]).unwrap();
    });
    assert!(wrong.len() == 1 && wrong[0].contains("commands were sent"), "{wrong:?}");
}
