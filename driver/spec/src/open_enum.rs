//! Enumerations that preserve unknown values.

/// Declares a newtype around an integer with named constants. Unknown values stay representable,
/// compare and print as numbers.
macro_rules! open_enum {
    (
        $(#[$meta:meta])*
        $name:ident: $int:ty {
            $($(#[$vmeta:meta])* $variant:ident = $value:expr,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(
            Clone, Copy, PartialEq, Eq, Hash, Default,
            zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout,
        )]
        #[repr(transparent)]
        pub struct $name(pub $int);

        impl $name {
            $($(#[$vmeta])* pub const $variant: Self = Self($value);)*

            /// Returns the name of the constant, if this value is known.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$variant => Some(stringify!($variant)),)*
                    _ => None,
                }
            }
        }

        impl $crate::dwords::Bits for $name {
            fn from_bits(bits: u64) -> Self {
                Self(bits as $int)
            }
            fn to_bits(self) -> u64 {
                self.0.into()
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, concat!(stringify!($name), "({:#x})"), self.0),
                }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                core::fmt::Debug::fmt(self, f)
            }
        }
    };
}
