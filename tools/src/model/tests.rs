use super::*;

fn shape(name: &str, block_tokens: u32) -> Result<Shape, Problem> {
    Shape::new(named(name).unwrap(), block_tokens)
}

/// Sizes from the models' authors and the paper.
#[test]
fn objects_have_the_known_sizes() {
    for (model, tokens, object, token) in [
        ("llama-3-8b", 16, 32 << 10, 128 << 10),
        ("llama-3-8b", 64, 128 << 10, 128 << 10),
        ("qwen3-32b", 64, 128 << 10, 256 << 10),
        ("deepseek-v3-mla", 16, 18 << 10, 61 * 1152),
        ("deepseek-v3-mla", 64, 72 << 10, 61 * 1152),
    ] {
        let shape = shape(model, tokens).unwrap();
        assert_eq!(shape.object_bytes, object, "{model}");
        assert_eq!(shape.block_bytes() / u64::from(tokens), token, "{model}");
        assert_eq!(shape.subs() * tokens, 512);
    }
    let tiny = shape("tiny", 512).unwrap();
    assert_eq!((tiny.object_bytes, tiny.rows(), tiny.subs()), (1024, 4, 1));
}

#[test]
fn a_shape_is_four_numbers_above_zero() {
    let expected = KvShape { layers: 4, segments: 1, object_bytes: 65536, block_tokens: 32 };
    assert_eq!(super::shape("4,1,65536,32"), Ok(expected));
    for wrong in ["", "4", "4,1,65536", "4,1,65536,32,1", "4,1,x,65536,32", "4,1,-1,32"] {
        assert!(super::shape(wrong).unwrap_err().contains("four whole numbers"), "{wrong}");
    }
    assert!(super::shape("4,1,0,32").unwrap_err().contains("object_bytes"));
}

#[test]
fn blocks_that_do_not_fit_are_refused() {
    for tokens in [0, 3, 48, 100, 513, 1024] {
        let problem = shape("llama-3-8b", tokens).unwrap_err();
        assert!(problem.to_string().contains(&format!("--block-tokens {tokens}")));
    }
    let problem = shape("tiny", 1).unwrap_err();
    assert!(problem.to_string().contains("not a multiple of 4"), "{problem}");
    assert!(problem.hint().contains("at least 2"), "{}", problem.hint());
}
