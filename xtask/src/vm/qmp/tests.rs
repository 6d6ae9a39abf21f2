use std::thread;

use super::*;

/// Returns a monitor that answers each line with the next batch.
fn monitor(batches: &'static [&'static str]) -> Result<Qmp> {
    let (ours, theirs) = UnixStream::pair()?;
    thread::spawn(move || -> io::Result<()> {
        let mut writer = theirs.try_clone()?;
        writer.write_all(b"{\"QMP\": {}}\n")?;
        let mut lines = BufReader::new(theirs).lines();
        for batch in ["{\"return\": {}}\n"].iter().chain(batches) {
            lines.next().transpose()?;
            writer.write_all(batch.as_bytes())?;
        }
        Ok(())
    });
    Qmp::new(ours)
}

#[test]
fn an_event_before_the_answer_is_kept() {
    let mut qmp = monitor(&["{\"event\": \"RESET\"}\n{\"return\": 7}\n"]).unwrap();
    assert_eq!(qmp.execute(&json!({ "execute": "x" })).unwrap(), json!(7));
    assert!(qmp.wait("RESET", Duration::from_secs(600)).is_ok());
}

#[test]
fn an_error_says_what_was_asked() {
    let mut qmp = monitor(&["{\"error\": {\"desc\": \"no such thing\"}}\n"]).unwrap();
    let error = qmp.execute(&json!({ "execute": "fly" })).unwrap_err().to_string();
    assert!(error.contains("fly") && error.contains("no such thing"), "{error}");
}

#[test]
fn waiting_ends() {
    let mut qmp = monitor(&["", ""]).unwrap();
    assert!(qmp.wait("NEVER", Duration::from_millis(20)).is_err());
}
