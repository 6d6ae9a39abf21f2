//! Source code with its comments, and optionally its strings, blanked out.
//!
//! Not a parser: just enough of the lexical rules of Rust and C++ that a word in a comment is not
//! taken for code. Offsets and line numbers stay those of the source.

/// Parts to blank out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    Comments,
    CommentsAndStrings,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Language {
    Rust,
    Cpp,
}

/// A byte range, by kind, with its end.
enum Found {
    Comment(usize),
    Text(usize),
    Code,
}

/// Returns `source` with the masked parts replaced by spaces, byte for byte.
pub fn mask(source: &str, language: Language, what: Mask) -> String {
    let bytes = source.as_bytes();
    let mut masked = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let (end, hide) = match next(bytes, at, language) {
            Found::Comment(end) => (end, true),
            Found::Text(end) => (end, what == Mask::CommentsAndStrings),
            Found::Code => (at + 1, false),
        };
        if hide {
            masked[at..end].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
        }
        at = end;
    }
    String::from_utf8(masked).expect("only whole tokens were replaced by ASCII")
}

/// Returns the kind and the end of the token at `at`.
fn next(bytes: &[u8], at: usize, language: Language) -> Found {
    let rest = &bytes[at..];
    if rest.starts_with(b"//") {
        return Found::Comment(at + rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len()));
    }
    if rest.starts_with(b"/*") {
        return Found::Comment(block_comment(bytes, at, language));
    }
    let starts_word = at == 0 || !is_word(bytes[at - 1]);
    match (rest[0], language) {
        (b'r' | b'b' | b'c', Language::Rust) if starts_word => rust_prefixed(bytes, at),
        (b'R', Language::Cpp) if starts_word && rest.starts_with(b"R\"") => {
            let open = rest.iter().position(|&b| b == b'(').unwrap_or(2).max(2);
            let close = [b")", &rest[2..open], b"\""].concat();
            Found::Text(after(bytes, at + open, &close))
        }
        (b'"', _) => Found::Text(quoted(bytes, at)),
        (b'\'', Language::Rust) => rust_quote(bytes, at),
        // Not the digit separator of 1'000'000.
        (b'\'', Language::Cpp) if starts_word => Found::Text(quoted(bytes, at)),
        _ => Found::Code,
    }
}

/// Returns the end of a block comment; in Rust they nest.
fn block_comment(bytes: &[u8], at: usize, language: Language) -> usize {
    let (mut depth, mut end) = (1, at + 2);
    while depth > 0 && end < bytes.len() {
        if bytes[end..].starts_with(b"*/") {
            (depth, end) = (depth - 1, end + 2);
        } else if language == Language::Rust && bytes[end..].starts_with(b"/*") {
            (depth, end) = (depth + 1, end + 2);
        } else {
            end += 1;
        }
    }
    end
}

/// Matches raw, byte and C strings: r"", r#""#, b"", br"", c"", cr"".
fn rust_prefixed(bytes: &[u8], at: usize) -> Found {
    let letters = bytes[at..].iter().take_while(|b| b"rbc".contains(b)).count();
    let raw = bytes[at..at + letters].contains(&b'r');
    let hashes = bytes[at + letters..].iter().take_while(|&&b| b == b'#').count();
    let quote = at + letters + hashes;
    if letters > 2 || bytes.get(quote) != Some(&b'"') {
        return Found::Code;
    }
    if raw {
        let close = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
        return Found::Text(after(bytes, quote + 1, &close));
    }
    if hashes == 0 { Found::Text(quoted(bytes, quote)) } else { Found::Code }
}

/// Matches a character, or a lifetime.
fn rust_quote(bytes: &[u8], at: usize) -> Found {
    let rest = &bytes[at + 1..];
    let width = match rest.first() {
        None => return Found::Code,
        Some(b'\\') => return Found::Text(quoted(bytes, at)),
        // The length of a UTF-8 sequence, from its first byte.
        Some(&byte) => byte.leading_ones().max(1) as usize,
    };
    if rest.get(width) == Some(&b'\'') { Found::Text(at + width + 2) } else { Found::Code }
}

/// Returns the end of the literal that the quotation mark at `at` opens, with backslash escapes.
fn quoted(bytes: &[u8], at: usize) -> usize {
    let mut end = at + 1;
    while end < bytes.len() {
        match bytes[end] {
            b'\\' => end += 2,
            byte if byte == bytes[at] => return end + 1,
            _ => end += 1,
        }
    }
    bytes.len()
}

fn after(bytes: &[u8], from: usize, close: &[u8]) -> usize {
    let rest = bytes.get(from..).unwrap_or_default();
    rest.windows(close.len())
        .position(|w| w == close)
        .map_or(bytes.len(), |i| from + i + close.len())
}

pub fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

/// Returns the offsets of `word` in `text` as a whole word.
pub fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let bytes = text.as_bytes();
    text.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let end = at + word.len();
        (at == 0 || !is_word(bytes[at - 1])) && (end == bytes.len() || !is_word(bytes[end]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_stays_and_the_rest_goes() {
        for (source, code) in [
            ("a // b\nc", "a     \nc"),
            ("a /* b /* c */ d */ e", "a                   e"),
            (r#"f("x\"y", z)"#, "f(      , z)"),
            (r###"f(r#"x"y"#, z)"###, "f(        , z)"),
            (r#"f(b"x", br"\", c"y", z)"#, "f(    ,      ,     , z)"),
            ("let c = '\"'; d", "let c =    ; d"),
            ("let c = '\\''; d", "let c =     ; d"),
            ("let c = 'é'; d", "let c =     ; d"),
            ("fn f<'a>(x: &'a str) {}", "fn f<'a>(x: &'a str) {}"),
            ("'a: loop { '/' }", "'a: loop {     }"),
            ("let r#type = break_r; d", "let r#type = break_r; d"),
            ("\"never closed", "             "),
        ] {
            assert_eq!(mask(source, Language::Rust, Mask::CommentsAndStrings), code, "{source}");
        }
    }

    #[test]
    fn cpp_differs() {
        for (source, code) in [
            ("a /* b /* c */ d", "a              d"),
            ("x = 1'000'000; // y", "x = 1'000'000;     "),
            ("f(R\"(a\"b)\", '\"', z)", "f(        ,    , z)"),
            ("f(R\"x(a)\")x\", z)", "f(          , z)"),
        ] {
            assert_eq!(mask(source, Language::Cpp, Mask::CommentsAndStrings), code, "{source}");
        }
    }

    #[test]
    fn strings_can_stay() {
        let masked = mask("a(\"b // c\") // d", Language::Cpp, Mask::Comments);
        assert_eq!(masked, "a(\"b // c\")     ");
    }

    #[test]
    fn words_stand_alone() {
        let found: Vec<usize> = words("unsafe_code unsafe, an_unsafe unsafe", "unsafe").collect();
        assert_eq!(found, [12, 30]);
    }
}
