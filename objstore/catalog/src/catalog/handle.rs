//! Handles that cross processes: plain numbers, each valid once.

/// Values by handle. A handle holds slot and generation, so that a stale one never matches the next
/// value in its slot.
#[derive(Debug)]
pub struct Handles<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Handles<T> {
    /// Makes an empty table.
    pub fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    /// Stores a value and returns its handle.
    pub fn insert(&mut self, value: T) -> u64 {
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            self.slots.len() as u32 - 1
        });
        let (generation, slot) = &mut self.slots[at as usize];
        *generation = generation.wrapping_add(1);
        *slot = Some(value);
        u64::from(*generation) << 32 | u64::from(at)
    }

    /// Returns the value of a valid handle.
    pub fn get(&self, number: u64) -> Option<&T> {
        let (generation, value) = self.slots.get(number as u32 as usize)?;
        value.as_ref().filter(|_| u64::from(*generation) == number >> 32)
    }

    /// Same as [`Handles::get`], mutable.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let (generation, value) = self.slots.get_mut(number as u32 as usize)?;
        value.as_mut().filter(|_| u64::from(*generation) == number >> 32)
    }

    /// Removes the value; its handle becomes invalid.
    pub fn remove(&mut self, number: u64) -> Option<T> {
        self.get(number)?;
        self.free.push(number as u32);
        self.slots[number as u32 as usize].1.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_valid_until_it_is_given_back() {
        let mut handles = Handles::new();
        let (a, b) = (handles.insert('a'), handles.insert('b'));
        assert_eq!((handles.get(a), handles.get(b)), (Some(&'a'), Some(&'b')));
        assert_eq!(handles.remove(a), Some('a'));
        assert_eq!(handles.remove(a), None);
        let c = handles.insert('c');
        assert_eq!(c as u32, a as u32, "the slot is used again");
        assert_eq!(handles.get(a), None);
        assert_eq!(handles.get_mut(a), None);
        assert_eq!(handles.remove(a), None);
        assert_eq!(handles.get_mut(c), Some(&mut 'c'));
        assert_eq!(handles.get(u64::MAX), None);
    }
}
