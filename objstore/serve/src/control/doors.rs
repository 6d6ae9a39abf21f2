//! Connections over TCP: those without the token keep nobody out who has it.

use std::{cmp::Reverse, collections::BTreeMap, net::IpAddr};

/// Connections over TCP at a time.
const CONNECTIONS_MAX: usize = 32;
/// Of these, those of an address that has not given the token yet.
const STRANGERS_MAX: usize = 8;

/// The connections over TCP, by number: older ones first.
#[derive(Debug, Default)]
pub(crate) struct Doors(BTreeMap<u64, Visitor>);

#[derive(Debug)]
struct Visitor {
    from: IpAddr,
    /// True if it has given the token.
    is_known: bool,
}

/// Result of [`Doors::enter`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Door {
    /// There is room.
    Open,
    /// There is room once this connection is ended.
    Instead(u64),
    /// There is none: all have given the token.
    Closed,
}

impl Doors {
    /// Takes in a connection. Beyond a limit it replaces the oldest one without the token: of the
    /// same address if that has its share, or else of the address that has the most.
    pub(crate) fn enter(&mut self, number: u64, from: IpAddr) -> Door {
        let mut strangers: BTreeMap<IpAddr, (usize, u64)> = BTreeMap::new();
        for (number, visitor) in self.0.iter().filter(|(_, visitor)| !visitor.is_known) {
            strangers.entry(visitor.from).or_insert((0, *number)).0 += 1;
        }
        let own = strangers.get(&from).filter(|(count, _)| *count >= STRANGERS_MAX);
        let oldest = match own {
            Some((_, oldest)) => Some(*oldest),
            None if self.0.len() < CONNECTIONS_MAX => None,
            None => match strangers.values().max_by_key(|(count, first)| (*count, Reverse(*first)))
            {
                Some((_, oldest)) => Some(*oldest),
                None => return Door::Closed,
            },
        };
        self.0.insert(number, Visitor { from, is_known: false });
        match oldest {
            Some(oldest) => {
                self.0.remove(&oldest);
                Door::Instead(oldest)
            }
            None => Door::Open,
        }
    }

    /// Notes that a connection has given the token.
    pub(crate) fn know(&mut self, number: u64) {
        if let Some(visitor) = self.0.get_mut(&number) {
            visitor.is_known = true;
        }
    }

    pub(crate) fn leave(&mut self, number: u64) {
        self.0.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_addresses_with_as_many_the_oldest_makes_room() {
        let mut doors = Doors::default();
        let address = |last| IpAddr::from([10, 0, 0, last]);
        // The newest has the largest address.
        for number in 0..32 {
            assert_eq!(doors.enter(number, address(number as u8)), Door::Open);
        }
        assert_eq!(doors.enter(32, address(200)), Door::Instead(0));
        assert_eq!(doors.enter(33, address(100)), Door::Instead(1));
    }

    #[test]
    fn strangers_make_room_for_each_other() {
        let mut doors = Doors::default();
        let address = |last| IpAddr::from([10, 0, 0, last]);
        // An address has its share, also while there is room.
        for number in 0..8 {
            assert_eq!(doors.enter(number, address(1)), Door::Open);
        }
        assert_eq!(doors.enter(8, address(1)), Door::Instead(0));
        // Those who have given the token do not count to that, and stay.
        doors.know(1);
        assert_eq!(doors.enter(9, address(1)), Door::Open);
        assert_eq!(doors.enter(10, address(1)), Door::Instead(2));
        for number in 100..123 {
            assert_eq!(doors.enter(number, address(number as u8)), Door::Open);
        }
        // All are taken: the address that has the most gives one up, for another one as well.
        assert_eq!(doors.enter(200, address(2)), Door::Instead(3));
        doors.leave(100);
        assert_eq!(doors.enter(201, address(3)), Door::Open);
        for number in [1, 4, 5, 6, 7, 8, 9, 10, 200, 201].into_iter().chain(101..123) {
            doors.know(number);
        }
        assert_eq!(doors.enter(300, address(4)), Door::Closed);
        doors.leave(1);
        assert_eq!(doors.enter(301, address(4)), Door::Open);
    }
}
