//! Typed views of command and completion dwords, declared by the position of each field.

use crate::ids::QueueId;

/// Extracts bits `lo..lo + width` of `value`.
pub(crate) const fn field(value: u64, lo: u32, width: u32) -> u64 {
    (value >> lo) & ((1 << width) - 1)
}

/// Replaces bits `lo..lo + width` of `value`.
pub(crate) const fn with_field(value: u64, lo: u32, width: u32, to: u64) -> u64 {
    let mask = ((1u64 << width) - 1) << lo;
    (value & !mask) | ((to << lo) & mask)
}

/// A type that a bit field can hold.
pub(crate) trait Bits {
    fn from_bits(bits: u64) -> Self;
    fn to_bits(self) -> u64;
}

macro_rules! integers {
    ($($int:ty)*) => {$(
        impl Bits for $int {
            fn from_bits(bits: u64) -> Self {
                bits as Self
            }
            fn to_bits(self) -> u64 {
                self.into()
            }
        }
    )*};
}

integers!(u8 u16 u32 u64);

impl Bits for bool {
    fn from_bits(bits: u64) -> Self {
        bits != 0
    }
    fn to_bits(self) -> u64 {
        self.into()
    }
}

impl Bits for QueueId {
    fn from_bits(bits: u64) -> Self {
        Self(bits as u16)
    }
    fn to_bits(self) -> u64 {
        self.0.into()
    }
}

/// Declares a view of a submission queue entry. Each field lists its bits as `dword[lowest,
/// width]`; multiple parts are concatenated, least significant first.
macro_rules! command_dwords {
    (
        $(#[$meta:meta])*
        $name:ident {
            $(
                $(#[$fmeta:meta])*
                $field:ident: $ty:ty = $($dword:ident[$lo:literal, $width:literal])+;
            )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct $name {
            $($(#[$fmeta])* pub $field: $ty,)*
        }

        impl $name {
            /// Reads the dwords of `sqe`.
            #[must_use]
            pub fn from_sqe(sqe: &$crate::sqe::Sqe) -> Self {
                use $crate::dwords::{Bits, field};
                $(
                    let (mut $field, mut at) = (0, 0);
                    $(
                        $field |= field(sqe.$dword.into(), $lo, $width) << at;
                        at += $width;
                    )+
                    let _: u32 = at;
                )*
                Self { $($field: Bits::from_bits($field),)* }
            }

            /// Writes the dwords into `sqe`.
            pub fn write_to(self, sqe: &mut $crate::sqe::Sqe) {
                use $crate::dwords::{Bits, with_field};
                $(
                    let mut $field = self.$field.to_bits();
                    $(
                        sqe.$dword = with_field(sqe.$dword.into(), $lo, $width, $field) as u32;
                        $field >>= $width;
                    )+
                    let _ = $field;
                )*
            }
        }
    };
}

/// Declares a view of one dword in the same way.
macro_rules! dword {
    (
        $(#[$meta:meta])*
        $name:ident {
            $($(#[$fmeta:meta])* $field:ident: $ty:ty = $lo:literal, $width:literal;)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct $name {
            $($(#[$fmeta])* pub $field: $ty,)*
        }

        impl $name {
            /// Reads a dword.
            #[must_use]
            pub fn from_dword(dword: u32) -> Self {
                use $crate::dwords::{Bits, field};
                Self { $($field: Bits::from_bits(field(dword.into(), $lo, $width)),)* }
            }

            /// Converts to a dword.
            #[must_use]
            pub fn to_dword(self) -> u32 {
                use $crate::dwords::{Bits, with_field};
                let mut dword = 0;
                $(dword = with_field(dword, $lo, $width, self.$field.to_bits());)*
                dword as u32
            }
        }
    };
}
