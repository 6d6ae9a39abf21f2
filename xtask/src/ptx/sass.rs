//! Instructions, as the disassembler prints them.

/// An instruction, without its predicate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    pub address: u64,
    pub opcode: String,
    pub operands: String,
}

impl Instruction {
    /// Returns true if the opcode is `name` with all of these modifiers: `STG.E.MMIO.SYS` is `STG`
    /// with `MMIO` and `SYS`.
    pub fn is(&self, name: &str, modifiers: &[&str]) -> bool {
        let mut parts = self.opcode.split('.');
        parts.next() == Some(name)
            && modifiers.iter().all(|wanted| self.opcode.split('.').any(|part| part == *wanted))
    }

    /// Returns true for a load from memory that others see: global, or of an unknown space.
    pub fn is_load(&self, modifiers: &[&str]) -> bool {
        self.is("LDG", modifiers) || self.is("LD", modifiers)
    }

    /// Returns true for a store to memory that others see.
    pub fn is_store(&self, modifiers: &[&str]) -> bool {
        self.is("STG", modifiers) || self.is("ST", modifiers)
    }

    /// Returns the target of a branch.
    pub fn target(&self) -> Option<u64> {
        if !self.is("BRA", &[]) {
            return None;
        }
        let last = self.operands.rsplit([' ', ',']).next()?;
        u64::from_str_radix(last.trim().strip_prefix("0x")?, 16).ok()
    }

    /// Returns base register and offset of a memory operand: `desc[UR6][R134.64+0x20], R44`.
    pub fn address_operand(&self) -> Option<(&str, u64)> {
        let close = self.operands.rfind(']')?;
        let open = self.operands[..close].rfind('[')?;
        let inside = &self.operands[open + 1..close];
        let (base, offset) = inside.split_once('+').unwrap_or((inside, "0x0"));
        Some((base, u64::from_str_radix(offset.strip_prefix("0x")?, 16).ok()?))
    }
}

/// Parses a listing with lines like `/*0be0*/ @!P1 STG.E.MMIO.SYS [R40], R53 ;`.
pub fn parse(listing: &str) -> Vec<Instruction> {
    listing.lines().filter_map(instruction).collect()
}

/// Returns the part of a listing for one function.
pub fn function<'a>(listing: &'a str, name: &str) -> &'a str {
    const HEAD: &str = "Function : ";
    let mut parts = listing.split(HEAD).skip(1);
    parts.find(|part| part.lines().next().is_some_and(|head| head.trim() == name)).unwrap_or("")
}

fn instruction(line: &str) -> Option<Instruction> {
    let (address, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let address = u64::from_str_radix(address, 16).ok()?;
    let mut text = rest.split_once(';')?.0.trim();
    if text.starts_with('@') {
        text = text.split_once(' ')?.1.trim_start();
    }
    let (opcode, operands) = text.split_once(' ').unwrap_or((text, ""));
    let (opcode, operands) = (opcode.to_owned(), operands.trim().to_owned());
    (!opcode.is_empty()).then_some(Instruction { address, opcode, operands })
}

/// Returns true if an instruction is between a backward branch and its target.
pub fn in_loop(all: &[Instruction], address: u64) -> bool {
    all.iter().any(|branch| {
        branch.address >= address && branch.target().is_some_and(|target| target <= address)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_read() {
        let text = "\
\tcode for sm_90
        /*0be0*/              @!P1 STG.E.MMIO.SYS [R40], R53 ;   /* 0x0000003528009986 */
                                                                 /* 0x0003e2000c11e100 */
        /*c080*/                   STG.E.128 desc[UR6][R134.64+0x20], R44 ;  /* 0x00 */
        /*c5f0*/               @P0 BRA P3, 0x280 ;               /* 0x00 */
        /*0480*/                   ERRBAR;                       /* 0x00 */";
        let all = parse(text);
        assert_eq!(all.len(), 4);
        assert_eq!(all[0].address, 0xbe0);
        assert!(all[0].is_store(&["MMIO", "SYS"]) && !all[0].is_store(&["128"]));
        assert_eq!(all[0].address_operand(), Some(("R40", 0)));
        assert_eq!(all[1].address_operand(), Some(("R134.64", 0x20)));
        assert_eq!(all[2].target(), Some(0x280));
        assert_eq!(all[3].opcode, "ERRBAR");
        assert!(in_loop(&all, 0xbe0) && !in_loop(&all, 0x100));
    }

    #[test]
    fn each_function_has_its_own_part_of_a_listing() {
        let text = "\tcode for sm_90\n\t\tFunction : ab\n /*0*/ EXIT ;\n\
                    \t\tFunction : a\n /*0*/ NOP ;\n /*10*/ EXIT ;\n";
        assert_eq!(parse(function(text, "ab")).len(), 1);
        assert_eq!(parse(function(text, "a")).len(), 2);
        assert_eq!(function(text, "b"), "");
    }
}
