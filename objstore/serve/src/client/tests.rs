//! Tests with a server that is a script.

use std::{
    os::unix::net::{UnixListener, UnixStream},
    sync::mpsc,
    thread,
};

use kv_catalog::lock;
use objstore::{BlockKey, Direction, Layer, Namespace};
use ripieno_testkit::{WATCHDOG, until};
use tempfile::TempDir;

use super::{
    begin::{REFUSED_PAUSE, RETRY_EVERY},
    *,
};
use crate::error::RefusalKind;

const SHAPE: KvShape = KvShape { layers: 1, segments: 1, object_bytes: 4096, block_tokens: 16 };

fn welcome() -> Answer {
    let session = Bytes(vec![1; 16]);
    Answer::Welcome { session, shape: SHAPE, is_paced: false }
}

/// Answers the calls of the next connection in this order. Dropping what it returns closes it.
fn serve(listener: &UnixListener, answers: &[Answer]) -> UnixStream {
    let stream = listener.accept().unwrap().0;
    for answer in answers {
        let call = protocol::receive::<Call>(&stream).unwrap();
        assert!(matches!(call, Received::Message(..)));
        protocol::send(&stream, answer, None).unwrap();
    }
    stream
}

const FULL: u8 = 7;

/// Fills the first block.
fn fill(client: &Client) {
    let bytes = vec![FULL; client.shape().block_bytes() as usize];
    client.write(BlockId(0), &bytes).unwrap();
}

/// Fills the first block, and begins to load it. The script says which layers were started.
fn begin(client: &Client) -> Request {
    fill(client);
    client.begin(Direction::Read, &[1 << 16], vec![BlockId(0)]).unwrap()
}

fn bind() -> (TempDir, PathBuf, UnixListener) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    (dir, path, listener)
}

#[test]
fn a_server_that_does_not_answer_is_not_asked_at_each_call() {
    let (_dir, path, listener) = bind();
    let server = thread::spawn(move || {
        serve(&listener, &[welcome()]);
        serve(&listener, &[welcome()]);
        // Takes longer than the usual pause.
        let hung = listener.accept().unwrap();
        thread::sleep(REFUSED_PAUSE + RETRY_EVERY);
        drop(hung);
        listener
    });
    let client = Client::join(path, SHAPE, None, None).unwrap();
    let begun_at = Instant::now();
    // A call or two find out that the sessions are lost.
    until("it has met the server that hangs", || {
        assert!(client.counts().unwrap_err().is_away());
        lock(&client.inner.beginning).is_some()
    });
    let listener = server.join().unwrap();
    let retry_at = lock(&client.inner.beginning).expect("it pauses");
    assert!(retry_at >= begun_at + 2 * (REFUSED_PAUSE + RETRY_EVERY), "as long as it took");
    // However slow this machine is, the next call comes before that.
    *lock(&client.inner.beginning) = Some(Instant::now() + WATCHDOG);
    listener.set_nonblocking(true).unwrap();
    assert!(client.counts().unwrap_err().is_away());
    assert!(listener.accept().is_err(), "it was asked again");
}

#[test]
fn thirty_two_layers_take_four_messages() {
    const DEEP: KvShape = KvShape { layers: 32, ..SHAPE };
    let (_dir, path, listener) = bind();
    let server = thread::spawn(move || {
        let session = Bytes(vec![1; 16]);
        let welcome = Answer::Welcome { session, shape: DEEP, is_paced: false };
        serve(&listener, std::slice::from_ref(&welcome));
        let prefix = Answer::Prefix { prefix: 1, blocks: 1 };
        let request = |started| Answer::Request { request: 2, started };
        let reserved = Answer::Reserved { reservation: 3, accepted: 1, positions: vec![0] };
        let layers = |layers| Answer::Number(layers);
        let refused = Answer::Refused { kind: RefusalKind::Transfer, message: String::new() };
        let answers = [
            &[welcome, layers(0)][..],
            &[prefix.clone(), request(32), layers(32), Answer::Done],
            &[reserved, request(32), layers(32), Answer::Done],
            // More if the server answers for a part of the layers.
            &[prefix.clone(), request(1), layers(30), layers(1), layers(31), layers(1)],
            &[Answer::Done],
            // Those after one that failed are waited for.
            &[prefix, request(32), layers(7), refused, layers(24), Answer::Done],
        ];
        serve(&listener, &answers.concat())
    });
    let client = Client::connect(path, DEEP, 1).unwrap();
    let space = client.namespace(&Namespace::default()).unwrap();
    let (key, block) = ([BlockKey([1; 32])], [BlockId(0)]);
    assert_eq!(client.load(space, &key, &block).unwrap(), [true]);
    assert_eq!(client.save(space, &key, &block).unwrap(), 1);
    assert_eq!(client.load(space, &key, &block).unwrap(), [true]);
    let failed = client.load(space, &key, &block).unwrap_err();
    assert!(matches!(failed, ServeError::Refused { kind: RefusalKind::Transfer, .. }), "{failed}");
    drop(server.join().unwrap());
}

#[test]
fn blocks_that_a_living_server_reads_are_not_replaced() {
    let (_dir, path, listener) = bind();
    let request = |request| Answer::Request { request, started: 1 };
    let message = "another call uses it".to_owned();
    let refused = Answer::Refused { kind: RefusalKind::Argument, message };
    let server = thread::spawn(move || {
        serve(&listener, &[welcome()]);
        // The first job's end is refused, and its release follows; then the session is lost.
        serve(&listener, &[welcome(), request(1), refused, Answer::Done, request(2)]);
        serve(&listener, &[welcome(), request(3)]);
    });
    let client = Client::connect(path, SHAPE, 1).unwrap();
    let end = || {
        let load = begin(&client);
        assert!(client.end(&[&load]).unwrap()[0].error.is_some());
        drop(load);
        client.read(BlockId(0)).unwrap()[0]
    };
    assert_eq!(end(), FULL, "it was refused");
    assert_eq!(end(), FULL, "the server has ended the session");
    assert_eq!(end(), 0, "it is unknown");
    server.join().unwrap();
}

#[test]
fn layers_that_had_arrived_stay_when_the_server_dies() {
    const TWO: KvShape = KvShape { layers: 2, ..SHAPE };
    for is_closed in [false, true] {
        let (_dir, path, listener) = bind();
        let server = thread::spawn(move || {
            let session = Bytes(vec![1; 16]);
            let welcome = Answer::Welcome { session, shape: TWO, is_paced: false };
            serve(&listener, std::slice::from_ref(&welcome));
            let request = Answer::Request { request: 1, started: 2 };
            serve(&listener, &[welcome, request, Answer::Number(1)]);
        });
        let client = Client::connect(path, TWO, 1).unwrap();
        let load = begin(&client);
        load.wait(Layer(0)).unwrap();
        server.join().unwrap();
        if is_closed {
            client.close().unwrap();
        }
        drop(load);
        let block = client.read(BlockId(0)).unwrap();
        // Memory of a client that was closed may be another one's.
        assert_eq!((block[0], block[4096]), (FULL, if is_closed { FULL } else { 0 }));
    }
}

#[test]
fn blocks_that_the_next_session_has_mapped_are_not_replaced() {
    let (_dir, path, listener) = bind();
    let server = thread::spawn(move || {
        serve(&listener, &[welcome()]);
        serve(&listener, &[welcome()]);
        serve(&listener, &[welcome()])
    });
    let client = Client::connect(path, SHAPE, 1).unwrap();
    fill(&client);
    let byte_after = |session| {
        client.replace(session, &[BlockId(0)], &BTreeSet::from([0])).unwrap();
        client.read(BlockId(0)).unwrap()[0]
    };
    let (first, _) = client.session();
    assert!(client.call_in(first, &Call::Sync).is_err(), "it is lost");
    let begun = client.live().unwrap();
    assert!(begun != first);
    // Another thread found out about the loss of the first one before that.
    assert_eq!(byte_after(first), FULL, "drives would write to the old pages");
    assert_eq!(byte_after(begun), 0);
    drop(server.join().unwrap());
}

#[test]
fn blocks_of_a_server_that_dies_before_they_are_durable_are_lost() {
    let (_dir, path, listener) = bind();
    let server = thread::spawn(move || {
        serve(&listener, &[welcome()]);
        let reserved = Answer::Reserved { reservation: 1, accepted: 1, positions: vec![0] };
        let answers = [Answer::Number(0), reserved];
        serve(&listener, &[&[welcome()], &answers[..]].concat());
        // Another one, which has none of them.
        serve(&listener, &[welcome(), Answer::Done]);
    });
    let client = Client::join(path, SHAPE, None, None).unwrap();
    let space = client.namespace(&Namespace::default()).unwrap();
    let room = client.reserve(space, &[BlockKey([1; 32])]).unwrap();
    assert_eq!(room.accepted(), 1);
    assert!(room.publish(true).unwrap_err().is_away());
    client.sync().unwrap();
    server.join().unwrap();
}

/// Returns a time that comes soon, and passes in tests only.
fn soon() -> Instant {
    Instant::now() + Duration::from_millis(300)
}

#[test]
fn a_server_that_takes_no_connection_is_given_up_on() {
    let (_dir, path, listener) = bind();
    let server = thread::spawn(move || {
        serve(&listener, &[welcome()]);
        serve(&listener, &[welcome()]);
        listener
    });
    let client = Client::join(path.clone(), SHAPE, None, None).unwrap();
    let listener = server.join().unwrap();
    // Room for one connection, which nobody takes.
    rustix::net::listen(&listener, 0).unwrap();
    let _first = UnixStream::connect(path).unwrap();
    let error = client.by(Some(soon())).live().unwrap_err().to_string();
    let has = |part: &str| error.contains(part);
    assert!(has("no connection was taken for ") && has(": restart a server"), "{error}");
    // The call's time, and not that of a call without a deadline.
    assert!(!has("for 90"), "{error}");
}

#[test]
fn a_call_with_a_deadline_does_not_wait_for_a_thread_that_connects() {
    let (_dir, path, listener) = bind();
    let ((hangs, is_hung), (end, is_over)) = (mpsc::channel(), mpsc::channel());
    let server = thread::spawn(move || {
        serve(&listener, &[welcome()]);
        serve(&listener, &[welcome()]);
        let _hello = listener.accept().unwrap();
        hangs.send(()).unwrap();
        is_over.recv().unwrap();
    });
    let client = Client::join(path, SHAPE, None, None).unwrap();
    thread::scope(|scope| {
        // Until the end of the session is seen.
        let other = scope.spawn(|| while client.live().is_ok() {});
        is_hung.recv().unwrap();
        client.by(Some(soon())).live().unwrap_err();
        client.check().unwrap_err();
        assert!(!other.is_finished(), "it was waited for");
        end.send(()).unwrap();
        other.join().unwrap();
    });
    server.join().unwrap();
}

#[test]
fn jobs_end_in_time_on_a_server_that_hangs() {
    for is_lost in [false, true] {
        let (_dir, path, listener) = bind();
        let (end, is_over) = mpsc::channel();
        let server = thread::spawn(move || {
            serve(&listener, &[welcome()]);
            let request = Answer::Request { request: 1, started: 1 };
            let stream = serve(&listener, &[welcome(), request]);
            // From here on, it answers neither the end nor the hello that follows a loss.
            let _hangs = (!is_lost).then_some(stream);
            is_over.recv().unwrap();
        });
        let client = Client::connect(path, SHAPE, 1).unwrap();
        let load = begin(&client);
        let report = client.by(Some(soon())).end_in_time(&[&load]).unwrap().remove(0);
        let error = report.error.expect("it does not answer");
        // The time of this call, and not that of one without a deadline.
        assert!(is_lost || error.contains("no answer came") && !error.contains("90"), "{error}");
        let found = client.read(BlockId(0)).unwrap()[0];
        assert_eq!(found, 0, "it is unknown if a device writes the block");
        end.send(()).unwrap();
        server.join().unwrap();
    }
}
