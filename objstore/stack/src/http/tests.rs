use std::os::unix::net::UnixStream;

use ripieno_testkit::WATCHDOG;

use super::*;

#[test]
fn an_answer_is_taken_only_whole() {
    let whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
    assert_eq!(parse_answer(whole), Some((200, &b"{}"[..])));
    for end in 0..whole.len() {
        assert_eq!(parse_answer(&whole[..end]), None, "{end} bytes");
    }
    assert_eq!(parse_answer(b"HTTP/1.1 200 OK\r\n\r\n{}"), None, "without a length");
    let large = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", usize::MAX);
    assert_eq!(parse_answer(large.as_bytes()), None);
}

#[test]
fn a_reply_is_read_as_it_was_written() {
    let (one, other) = UnixStream::pair().unwrap();
    let body = b"{\"blocks\":1}".to_vec();
    let headers = vec![("Allow", "GET".to_owned())];
    let reply = Reply { status: 405, content_type: "application/json", headers, body };
    Link::new(&one, WATCHDOG, WATCHDOG).reply(&reply, true).unwrap();
    drop(one);
    let mut answer = Vec::new();
    std::io::Read::read_to_end(&mut &other, &mut answer).unwrap();
    assert_eq!(parse_answer(&answer), Some((405, &reply.body[..])));
}
