use std::io;
use std::sync::{Arc, Mutex};

use super::*;

/// Output to a terminal of 80 columns.
#[derive(Debug, Clone, Default)]
struct Screen(Arc<Mutex<String>>);

impl indicatif::TermLike for Screen {
    fn width(&self) -> u16 {
        80
    }

    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.write_str(text)
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.0.lock().unwrap().push_str(text);
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn only_an_opening_that_takes_long_is_shown() {
    let screen = Screen::default();
    let target = ProgressDrawTarget::term_like_with_hz(Box::new(screen.clone()), 255);
    let mut opening = Opening::on(target);
    opening.read(1 << 20, 64 << 20, Duration::from_millis(499));
    assert_eq!(*screen.0.lock().unwrap(), "");
    opening.read(16 << 20, 64 << 20, Duration::from_millis(500));
    let shown = screen.0.lock().unwrap().clone();
    assert!(shown.contains("opening the store: 16.00 MiB of 64.00 MiB"), "{shown:?}");
}
